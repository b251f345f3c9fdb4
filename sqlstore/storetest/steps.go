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
		if err == nil || !isTransient(store, err) || ctx.Err() != nil {
			return tx, err
		}
	}
}

func isTransient(store inbox.Store, err error) bool {
	classifier, ok := store.(inbox.TransientClassifier)
	return ok && classifier.IsTransient(err)
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

// isRecorded reports whether a key has a record.
func isRecorded(ctx context.Context, store inbox.Store, claim inbox.Claim) (bool, error) {
	tx, err := begin(ctx, store, claim)
	if err != nil {
		return false, fmt.Errorf("begin %q: %w", claim.Key, err)
	}
	found := tx.Recorded() != nil
	if err := tx.Rollback(ctx); err != nil {
		return false, fmt.Errorf("rollback: %w", err)
	}
	return found, nil
}

// unclaimed checks that a key can be claimed.
func unclaimed(ctx context.Context, store inbox.Store, claim inbox.Claim) error {
	tx, err := own(ctx, store, claim)
	if err != nil {
		return err
	}
	return tx.Rollback(ctx)
}

// together checks that a claim and the effect called as its ID are both there or both not, and tells which.
func together(ctx context.Context, h *Harness, claim inbox.Claim) (committed bool, err error) {
	// First the claim, which waits for a transaction that the server is still about to end.
	if committed, err = isRecorded(ctx, h.Store, claim); err != nil {
		return false, err
	}
	effects, err := h.Effects(ctx)
	if err != nil {
		return false, err
	}
	if written := slices.Contains(effects, claim.Key.MessageID); written != committed {
		return false, fmt.Errorf("%q: claim committed: %t, effect committed: %t", claim.Key, committed, written)
	}
	return committed, nil
}

// wantEffects checks the committed effects.
func wantEffects(ctx context.Context, h *Harness, want ...string) error {
	got, err := h.Effects(ctx)
	if err != nil {
		return err
	}
	got, want = slices.Sorted(slices.Values(got)), slices.Sorted(slices.Values(want)) // not in place: checks share them
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
	case <-time.After(moment):
		return nil
	}
}

// moment is how long it takes to see that something does not happen.
const moment = 100 * time.Millisecond

// eventually asks until the answer is yes, and after a while returns what is the matter.
func eventually(ctx context.Context, yes func() bool, otherwise func() error) error {
	ctx, cancel := context.WithTimeout(ctx, 15*time.Second)
	defer cancel()
	for !yes() {
		select {
		case <-ctx.Done():
			return otherwise()
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}
