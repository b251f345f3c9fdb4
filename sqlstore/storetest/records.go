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

func recordTellsTimes(ctx context.Context, h *Harness) error {
	if err := process(ctx, h, claimOf("id")); err != nil {
		return err
	}
	record, err := recorded(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	// The database's clock may be another one, but not by hours: that would be a time zone.
	if age := time.Since(record.ReceivedAt); age < -10*time.Minute || age > 10*time.Minute {
		return fmt.Errorf("ReceivedAt is %s, which is %s ago", record.ReceivedAt, age)
	}
	if took := record.ProcessedAt.Sub(record.ReceivedAt); took < 0 || took > time.Minute {
		return fmt.Errorf("ReceivedAt is %s, ProcessedAt %s", record.ReceivedAt, record.ProcessedAt)
	}
	return nil
}

func fingerprintIsKept(ctx context.Context, h *Harness) error {
	for id, fingerprint := range map[string][]byte{"none": nil, "some": {0x00, 0xff, 0x27, 0x5c}, "long": bytes.Repeat([]byte{0xab}, 32)} {
		claim := claimOf(id)
		claim.Fingerprint = fingerprint
		if err := process(ctx, h, claim); err != nil {
			return err
		}
		record, err := recorded(ctx, h.Store, claimOf(id))
		if err != nil {
			return err
		}
		if !bytes.Equal(record.Fingerprint, fingerprint) || (fingerprint == nil) != (record.Fingerprint == nil) {
			return fmt.Errorf("fingerprint %x came back as %x", fingerprint, record.Fingerprint)
		}
	}
	return nil
}

// payloads are hard to store for one reason or another.
var payloads = [][]byte{
	nil,
	{},
	[]byte("{}"), []byte("{"),
	{0},
	[]byte(`"\u0000"`),
	{0xff, 0xfe},
	{0x08, 0x96, 0x01},
	[]byte("'; --"),
	bytes.Repeat([]byte{0x00, 0xff}, 1<<19),
}

// metadata likewise.
func metadata() message.Metadata {
	return message.Metadata{"": "", "name": "", "odd \xff\x00": "\x00\xfe", "quotes": `'"\`, "é": "ａ"}
}

func anyPayloadIsStored(ctx context.Context, h *Harness) error {
	for i, payload := range payloads {
		for j, m := range []message.Metadata{nil, {}, metadata()} {
			claim := claimOf(fmt.Sprint(i, j))
			claim.Message = message.NewMessage("", payload)
			claim.Message.Metadata = m
			if err := process(ctx, h, claim); err != nil {
				return fmt.Errorf("payload %d, metadata %d: %w", i, j, err)
			}
		}
	}
	return nil
}

func outputsAreKept(ctx context.Context, h *Harness) error {
	var outputs []*message.Message
	for i, payload := range payloads {
		outputs = append(outputs, message.NewMessage(fmt.Sprint("uuid-", len(payloads)-i), payload))
	}
	outputs[0].Metadata = nil
	outputs[1].Metadata = metadata()
	outputs = append(outputs, &message.Message{UUID: "\xff\x00"})

	tx, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	if err := tx.Rollback(ctx); err != nil {
		return err
	}
	for id, outputs := range map[string][]*message.Message{"id": outputs, "none": nil, "empty": {}} {
		if err := process(ctx, h, claimOf(id), outputs...); err != nil {
			return err
		}
		for range 2 {
			record, err := recorded(ctx, h.Store, claimOf(id))
			if err != nil {
				return err
			}
			if err := sameMessages(record.Outputs, outputs); err != nil {
				return fmt.Errorf("outputs of %q: %w", id, err)
			}
		}
	}
	return nil
}

func sameMessages(got, want []*message.Message) error {
	if len(got) != len(want) {
		return fmt.Errorf("%d messages, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i].UUID != want[i].UUID || !bytes.Equal(got[i].Payload, want[i].Payload) || !maps.Equal(got[i].Metadata, want[i].Metadata) {
			return fmt.Errorf("message %d is not what was recorded", i)
		}
	}
	return nil
}

func outputsAreMarked(ctx context.Context, h *Harness) error {
	marker, ok := h.Store.(inbox.OutputsMarker)
	if !ok {
		return skip("the store marks no outputs")
	}
	const many = 300 // more than are marked in one statement, likely
	output := message.NewMessage("output", nil)
	var keys []inbox.Key
	for i := range many {
		claim := claimOf(fmt.Sprint("marked ", i))
		keys = append(keys, claim.Key)
		if i%100 == 0 {
			if err := process(ctx, h, claim, output); err != nil {
				return err
			}
		}
	}
	others := []inbox.Claim{claimOf("other"), claimOf("MARKED 0"), {Key: inbox.Key{Consumer: "other", MessageID: "marked 0"}, LockTimeout: time.Second}}
	for _, other := range others {
		if err := process(ctx, h, other, output); err != nil {
			return err
		}
	}
	if err := process(ctx, h, claimOf("without")); err != nil {
		return err
	}
	keys = append(keys, claimOf("without").Key)
	for range 2 {
		if err := marker.MarkOutputsPublished(ctx, keys); err != nil {
			return err
		}
	}
	if err := marker.MarkOutputsPublished(ctx, nil); err != nil {
		return fmt.Errorf("no keys: %w", err)
	}
	for i := 0; i < many; i += 100 {
		record, err := recorded(ctx, h.Store, claimOf(fmt.Sprint("marked ", i)))
		if err != nil {
			return err
		}
		if len(record.Outputs) != 0 {
			return fmt.Errorf("marked outputs came back")
		}
	}
	for _, other := range others {
		record, err := recorded(ctx, h.Store, other)
		if err != nil {
			return err
		}
		if len(record.Outputs) != 1 {
			return fmt.Errorf("outputs of %q were marked with others", other.Key)
		}
	}
	return nil
}

func deletesExpired(ctx context.Context, h *Harness) error {
	deleter, ok := h.Store.(interface {
		DeleteExpired(ctx context.Context, age time.Duration, limit int) (int, error)
	})
	if !ok {
		return skip("the store deletes nothing")
	}
	for _, id := range []string{"1", "2", "3"} {
		if err := process(ctx, h, claimOf(id)); err != nil {
			return err
		}
	}
	if err := process(ctx, h, claimOf("unpublished"), message.NewMessage("output", nil)); err != nil {
		return err
	}
	if n, err := deleter.DeleteExpired(ctx, time.Hour, 100); n != 0 || err != nil {
		return fmt.Errorf("younger records: %d deleted, %w", n, err)
	}
	if _, err := deleter.DeleteExpired(ctx, -1, 100); err == nil {
		return errors.New("a negative age: no error")
	}
	// A claim that is open is in nobody's way, and nobody is in its.
	var held inbox.Tx
	if h.Serial == "" {
		var err error
		if held, err = own(ctx, h.Store, claimOf("held")); err != nil {
			return err
		}
	}
	deleted := 0
	for deleted < 3 { // stores may take their time, but not delete more than they are told
		n, err := deleter.DeleteExpired(ctx, 0, 2)
		if err != nil {
			return err
		}
		if n > 2 {
			return fmt.Errorf("limit 2: %d deleted", n)
		}
		if deleted += n; ctx.Err() != nil {
			return fmt.Errorf("%d deleted, want 3", deleted)
		}
	}
	if n, err := deleter.DeleteExpired(ctx, 0, 100); n != 0 || err != nil {
		return fmt.Errorf("all were deleted: %d more, %w", n, err)
	}
	if held != nil {
		if err := held.Commit(ctx, nil); err != nil {
			return errors.Join(fmt.Errorf("a claim beside the deletion: %w", err), held.Rollback(ctx))
		}
		if _, err := recorded(ctx, h.Store, claimOf("held")); err != nil {
			return err
		}
	}
	record, err := recorded(ctx, h.Store, claimOf("unpublished"))
	if err != nil {
		return fmt.Errorf("unpublished outputs: %w", err)
	}
	if len(record.Outputs) != 1 {
		return errors.New("unpublished outputs were dropped")
	}
	return process(ctx, h, claimOf("1"))
}

func forgetsKeys(ctx context.Context, h *Harness) error {
	forgetter, ok := h.Store.(interface {
		Forget(ctx context.Context, key inbox.Key) error
	})
	if !ok {
		return skip("the store forgets nothing")
	}
	for _, id := range []string{"id", "other"} {
		if err := process(ctx, h, claimOf(id)); err != nil {
			return err
		}
	}
	for range 2 {
		if err := forgetter.Forget(ctx, claimOf("id").Key); err != nil {
			return err
		}
	}
	if err := forgetter.Forget(ctx, inbox.Key{Consumer: consumer}); !errors.Is(err, inbox.ErrInvalidKey) {
		return fmt.Errorf("an invalid key: %w", err)
	}
	if _, err := recorded(ctx, h.Store, claimOf("other")); err != nil {
		return err
	}
	return unclaimed(ctx, h.Store, claimOf("id"))
}
