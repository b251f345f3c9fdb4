package storetest

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

const consumer = "storetest"

func claimOf(id string) inbox.Claim {
	return inbox.Claim{Key: inbox.Key{Consumer: consumer, MessageID: id}, LockTimeout: 20 * time.Second}
}

// begin begins, and begins again after errors that say so.
func begin(ctx context.Context, store inbox.Store, claim inbox.Claim) (inbox.Tx, error) {
	for {
		tx, err := store.Begin(ctx, claim)
		if classifier, ok := store.(inbox.TransientClassifier); err == nil || !ok || !classifier.IsTransient(err) || ctx.Err() != nil {
			return tx, err
		}
	}
}

// own claims a key that nobody else has.
func own(ctx context.Context, store inbox.Store, claim inbox.Claim) (inbox.Tx, error) {
	tx, err := begin(ctx, store, claim)
	if err != nil {
		return nil, fmt.Errorf("begin %q: %w", claim.Key, err)
	}
	if tx.Recorded() != nil {
		return nil, errors.Join(fmt.Errorf("%q has a record, although nobody committed it", claim.Key), tx.Rollback(ctx))
	}
	return tx, nil
}

// process processes a message, with an effect that is called as its ID.
func process(ctx context.Context, h *Harness, claim inbox.Claim, outputs ...*message.Message) error {
	tx, err := own(ctx, h.Store, claim)
	if err != nil {
		return err
	}
	if err := h.Write(ctx, tx.Native(), claim.Key.MessageID); err != nil {
		return errors.Join(fmt.Errorf("write: %w", err), tx.Rollback(ctx))
	}
	if err := tx.Commit(ctx, outputs); err != nil {
		return errors.Join(fmt.Errorf("commit: %w", err), tx.Rollback(ctx))
	}
	return nil
}

// recorded returns the record that a key has.
func recorded(ctx context.Context, store inbox.Store, claim inbox.Claim) (*inbox.Record, error) {
	tx, err := begin(ctx, store, claim)
	if err != nil {
		return nil, fmt.Errorf("begin %q: %w", claim.Key, err)
	}
	record := tx.Recorded()
	if err := tx.Rollback(ctx); err != nil {
		return nil, fmt.Errorf("rollback: %w", err)
	}
	if record == nil {
		return nil, fmt.Errorf("%q has no record, although it was committed", claim.Key)
	}
	return record, nil
}

// unclaimed checks that a key can be claimed.
func unclaimed(ctx context.Context, store inbox.Store, claim inbox.Claim) error {
	tx, err := own(ctx, store, claim)
	if err != nil {
		return err
	}
	return tx.Rollback(ctx)
}

// wantEffects checks the committed effects.
func wantEffects(ctx context.Context, h *Harness, want ...string) error {
	got, err := h.Effects(ctx)
	if err != nil {
		return err
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		return fmt.Errorf("the effects are %q, want %q", got, want)
	}
	return nil
}

// result is what a Begin on another goroutine came to.
type result struct {
	tx  inbox.Tx
	err error
}

func beginAside(ctx context.Context, store inbox.Store, claim inbox.Claim) <-chan result {
	results := make(chan result, 1)
	go func() {
		tx, err := begin(ctx, store, claim)
		results <- result{tx, err}
	}()
	return results
}

// stillWaits checks that nothing comes for a moment: the one thing that only time can show.
func stillWaits(results <-chan result) error {
	select {
	case r := <-results:
		if r.tx != nil {
			return fmt.Errorf("a Begin did not wait for the transaction that holds its key: record %v", r.tx.Recorded())
		}
		return fmt.Errorf("a Begin did not wait for the transaction that holds its key: %w", r.err)
	case <-time.After(100 * time.Millisecond):
		return nil
	}
}
