package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"maps"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

// oddOutputs returns messages that are hard to store. Their UUIDs are in no order.
func oddOutputs() []*message.Message {
	var outputs []*message.Message
	for i, payload := range payloads() {
		outputs = append(outputs, message.NewMessage(fmt.Sprint("uuid-", 9-i), payload))
	}
	outputs[0].Metadata = nil
	outputs[1].Metadata = metadata()
	return append(outputs,
		&message.Message{}, &message.Message{UUID: "\xff\x00"}, message.NewMessage("UUID", nil), message.NewMessage("uuid", nil))
}

func outputsAreKept(ctx context.Context, h *Harness) error {
	for id, outputs := range map[string]func() []*message.Message{
		"odd":   oddOutputs,
		"none":  func() []*message.Message { return nil },
		"empty": func() []*message.Message { return []*message.Message{} },
	} {
		handedOver := outputs()
		if err := process(ctx, h, claimOf(id), handedOver...); err != nil {
			return fmt.Errorf("outputs of %q: %w", id, err)
		}
		spoil(handedOver) // they are the handler's again
		for range 2 {
			record, err := recorded(ctx, h.Store, claimOf(id))
			if err != nil {
				return err
			}
			if err := sameMessages(record.Outputs, outputs()); err != nil {
				return fmt.Errorf("outputs of %q: %w", id, err)
			}
			spoil(record.Outputs)
		}
	}
	return nil
}

func spoil(msgs []*message.Message) {
	for _, msg := range msgs {
		msg.UUID += "spoilt"
		if len(msg.Payload) > 0 {
			msg.Payload[0]++
		}
		clear(msg.Metadata)
	}
}

func sameMessages(got, want []*message.Message) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d messages, want %d", len(got), len(want))
	}
	for i := range want {
		switch {
		case got[i].UUID != want[i].UUID:
			return fmt.Errorf("message %d has the UUID %q, want %q", i, got[i].UUID, want[i].UUID)
		case !bytes.Equal(got[i].Payload, want[i].Payload):
			return fmt.Errorf("message %d has another payload, of %d bytes, want %d", i, len(got[i].Payload), len(want[i].Payload))
		case got[i].Metadata == nil:
			return fmt.Errorf("message %d has no metadata, to which middlewares could add", i)
		case !maps.Equal(got[i].Metadata, want[i].Metadata):
			return fmt.Errorf("message %d has the metadata %q, want %q", i, got[i].Metadata, want[i].Metadata)
		}
	}
	return nil
}

// outputsGoWithTheirRecord is for stores that keep outputs anywhere else than in the record.
func outputsGoWithTheirRecord(ctx context.Context, h *Harness) error {
	output := message.NewMessage("output", nil)
	ended, cancel := context.WithCancel(ctx)
	cancel()
	claim := claimOf("failed")
	tx, err := own(ctx, h.Store, claim)
	if err != nil {
		return err
	}
	commitErr := tx.Commit(ended, []*message.Message{output})
	if err := tx.Rollback(ctx); err != nil {
		return fmt.Errorf("rollback after the commit: %w", err)
	}
	if commitErr != nil {
		committed, err := isRecorded(ctx, h.Store, claim)
		if err != nil {
			return err
		}
		if !committed {
			if err := processWithoutOutputs(ctx, h, claim); err != nil {
				return fmt.Errorf("after a commit that failed: %w", err)
			}
		}
	}
	store, ok := h.Store.(forgetter)
	if !ok {
		return nil
	}
	claim = claimOf("forgotten")
	if err := process(ctx, h, claim, output); err != nil {
		return err
	}
	if err := store.Forget(ctx, claim.Key); err != nil {
		return err
	}
	if err := processWithoutOutputs(ctx, h, claim); err != nil {
		return fmt.Errorf("after the key was forgotten: %w", err)
	}
	return nil
}

func processWithoutOutputs(ctx context.Context, h *Harness, claim inbox.Claim) error {
	if err := process(ctx, h, claim); err != nil {
		return err
	}
	return wantOutputs(ctx, h, claim, 0)
}

func outputsAreMarked(ctx context.Context, h *Harness) error {
	marker, ok := h.Store.(inbox.OutputsMarker)
	if !ok {
		return skip("the store marks no outputs")
	}
	// More keys than are marked in one statement, likely. Those that exist are few, and all over them: also when sorted.
	const many, every = 500, 50
	output := message.NewMessage("output", nil)
	marked := func(i int) inbox.Claim { return claimOf(fmt.Sprintf("marked %03d", i)) }
	var keys []inbox.Key
	for i := range many {
		claim := marked(i)
		keys = append(keys, claim.Key)
		if i%every == 0 {
			if err := process(ctx, h, claim, output); err != nil {
				return err
			}
		}
	}
	others := []inbox.Claim{
		claimOf("other"), claimOf("MARKED 000"), {Key: inbox.Key{Consumer: "other", MessageID: "marked 000"}, LockTimeout: time.Second},
	}
	for _, other := range others {
		if err := process(ctx, h, other, output); err != nil {
			return err
		}
	}
	if err := process(ctx, h, claimOf("without")); err != nil {
		return err
	}
	keys = append(keys, claimOf("without").Key)

	if err := marker.MarkOutputsPublished(ctx, nil); err != nil {
		return fmt.Errorf("no keys: %w", err)
	}
	if err := wantOutputs(ctx, h, marked(0), 1); err != nil {
		return err
	}
	for range 2 {
		if err := marker.MarkOutputsPublished(ctx, keys); err != nil {
			return err
		}
	}
	for i := 0; i < many; i += every {
		if err := wantOutputs(ctx, h, marked(i), 0); err != nil {
			return err
		}
	}
	for _, other := range others {
		if err := wantOutputs(ctx, h, other, 1); err != nil {
			return err
		}
	}
	return errors.Join(wantOutputs(ctx, h, claimOf("without"), 0), unclaimed(ctx, h.Store, marked(1)))
}

func wantOutputs(ctx context.Context, h *Harness, claim inbox.Claim, want int) error {
	record, err := recorded(ctx, h.Store, claim)
	if err != nil {
		return err
	}
	if len(record.Outputs) != want {
		return fmt.Errorf("%q has %d outputs, want %d", claim.Key, len(record.Outputs), want)
	}
	return nil
}
