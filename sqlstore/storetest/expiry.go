package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

// expirer is a store that deletes old records.
type expirer interface {
	DeleteExpired(ctx context.Context, age time.Duration, limit int) (deleted int, err error)
}

var errNoExpirer = skip("the store has no DeleteExpired")

// deletesByAge goes by the times in records, the database's clock, so that a slow machine does not matter.
func deletesByAge(ctx context.Context, h *Harness) error {
	store, ok := h.Store.(expirer)
	if !ok {
		return errNoExpirer
	}
	if _, err := store.DeleteExpired(ctx, -1, 100); err == nil {
		return errors.New("a negative age: no error")
	}
	const age = 500 * time.Millisecond
	for round := 0; ; round++ {
		old, slow := claimOf(fmt.Sprint("old ", round)), claimOf(fmt.Sprint("slow ", round))
		if err := process(ctx, h, old); err != nil {
			return err
		}
		// A transaction that takes longer than the age: its record is old when it comes to be there, and yet is not.
		tx, err := own(ctx, h.Store, slow)
		if err != nil {
			return err
		}
		began := time.Now()
		time.Sleep(age + moment)
		held := time.Since(began)
		if err := tx.Commit(ctx, nil); err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		record, err := recorded(ctx, h.Store, slow)
		if err != nil {
			return err
		}
		if _, err := store.DeleteExpired(ctx, age, 1000); err != nil {
			return err
		}
		now, err := clock(ctx, h, fmt.Sprint("clock ", round))
		if err != nil {
			return err
		}
		if now.Sub(record.ReceivedAt.Add(held)) >= age { // all of that took too long to prove anything
			continue
		}
		if _, err := recorded(ctx, h.Store, slow); err != nil {
			return fmt.Errorf("deleted before its time: %w", err)
		}
		return expires(ctx, h, store, age, old)
	}
}

// clock returns a time by the database's clock, not before now.
func clock(ctx context.Context, h *Harness, id string) (time.Time, error) {
	if err := process(ctx, h, claimOf(id)); err != nil {
		return time.Time{}, err
	}
	record, err := recorded(ctx, h.Store, claimOf(id))
	if err != nil {
		return time.Time{}, err
	}
	return record.ReceivedAt, nil
}

// expires checks that a record is deleted some time after the age, and that its key can be claimed then.
func expires(ctx context.Context, h *Harness, store expirer, age time.Duration, claim inbox.Claim) error {
	var err error
	gone := func() bool {
		if _, err = store.DeleteExpired(ctx, age, 1000); err != nil {
			return !isTransient(h.Store, err)
		}
		var tx inbox.Tx
		if tx, err = begin(ctx, h.Store, claim); err != nil {
			return true
		}
		recorded := tx.Recorded() != nil
		err = tx.Rollback(ctx)
		return !recorded || err != nil
	}
	stays := func() error { return errors.Join(fmt.Errorf("%q is not deleted", claim.Key), err) }
	if err := eventually(ctx, gone, stays); err != nil {
		return err
	}
	if err != nil {
		return err
	}
	return process(ctx, h, claim)
}

func deletesInBatches(ctx context.Context, h *Harness) error {
	store, ok := h.Store.(expirer)
	if !ok {
		return errNoExpirer
	}
	const records, limit = 5, 2
	for i := range records {
		if err := process(ctx, h, claimOf(fmt.Sprint(i))); err != nil {
			return err
		}
	}
	var err error
	deleted := 0
	all := func() bool {
		var n int
		if n, err = store.DeleteExpired(ctx, 0, limit); err == nil && n > limit {
			err = fmt.Errorf("limit %d: %d deleted", limit, n)
		}
		deleted += n
		gone := 0
		for i := 0; i < records && err == nil; i++ {
			var tx inbox.Tx
			if tx, err = begin(ctx, h.Store, claimOf(fmt.Sprint(i))); err == nil {
				if tx.Recorded() == nil {
					gone++
				}
				err = tx.Rollback(ctx)
			}
		}
		if err == nil && gone != deleted {
			err = fmt.Errorf("%d were deleted, and %d are said to be", gone, deleted)
		}
		return err != nil || deleted == records
	}
	some := func() error { return fmt.Errorf("%d were deleted, want %d", deleted, records) }
	if err := eventually(ctx, all, some); err != nil {
		return err
	}
	if err != nil {
		return err
	}
	if n, err := store.DeleteExpired(ctx, 0, limit); n != 0 || err != nil {
		return errors.Join(fmt.Errorf("all were deleted, and %d more", n), err)
	}
	return nil
}

func deletesNoUnpublishedOutputs(ctx context.Context, h *Harness) error {
	store, ok := h.Store.(expirer)
	if !ok {
		return errNoExpirer
	}
	if err := process(ctx, h, claimOf("pending"), message.NewMessage("output", nil)); err != nil {
		return err
	}
	if err := process(ctx, h, claimOf("younger")); err != nil {
		return err
	}
	if err := expires(ctx, h, store, 0, claimOf("younger")); err != nil {
		return err
	}
	if err := wantOutputs(ctx, h, claimOf("pending"), 1); err != nil {
		return err
	}
	marker, ok := h.Store.(inbox.OutputsMarker)
	if !ok {
		return nil // then there is no end to it
	}
	if err := marker.MarkOutputsPublished(ctx, []inbox.Key{claimOf("pending").Key}); err != nil {
		return err
	}
	return expires(ctx, h, store, 0, claimOf("pending"))
}

func deletesBesideClaims(ctx context.Context, h *Harness) error {
	store, ok := h.Store.(expirer)
	if !ok {
		return errNoExpirer
	}
	if h.Serial == "" {
		held, err := own(ctx, h.Store, claimOf("held"))
		if err != nil {
			return err
		}
		_, err = store.DeleteExpired(ctx, 0, 100)
		err = errors.Join(err, inFlight(ctx, h.Store, claimOf("held")), held.Commit(ctx, nil))
		if err = errors.Join(err, held.Rollback(ctx)); err != nil {
			return fmt.Errorf("beside an open claim: %w", err)
		}
		if _, err := recorded(ctx, h.Store, claimOf("held")); err != nil {
			return err
		}
	}

	// Claims of one key, which is deleted all the time: it is processed once for each time that it was claimed.
	deleting, stop := context.WithCancel(ctx)
	defer stop()
	var wg sync.WaitGroup
	var deleteErr error
	wg.Go(func() {
		for deleting.Err() == nil {
			if _, err := store.DeleteExpired(ctx, 0, 100); err != nil && !isTransient(h.Store, err) {
				deleteErr = fmt.Errorf("delete: %w", err)
				return
			}
		}
	})
	processed, err := claimOften(ctx, h, claimOf("id"))
	stop()
	wg.Wait()
	if err = errors.Join(err, deleteErr); err != nil {
		return err
	}
	var want []string
	for range processed {
		want = append(want, "id")
	}
	return wantEffects(ctx, h, want...)
}

// claimOften delivers a message many times, and returns how often it was processed.
func claimOften(ctx context.Context, h *Harness, claim inbox.Claim) (processed int, err error) {
	for range 50 {
		tx, err := begin(ctx, h.Store, claim)
		if err != nil {
			return 0, fmt.Errorf("begin %q: %w", claim.Key, err)
		}
		if tx.Recorded() == nil {
			if err := errors.Join(h.Write(ctx, tx.Native(), claim.Key.MessageID), tx.Commit(ctx, nil)); err != nil {
				return 0, errors.Join(err, tx.Rollback(ctx))
			}
			processed++
		}
		if err := tx.Rollback(ctx); err != nil {
			return 0, err
		}
	}
	return processed, nil
}

// forgetter is a store that forgets single keys.
type forgetter interface {
	Forget(ctx context.Context, key inbox.Key) error
}

func forgetsKeys(ctx context.Context, h *Harness) error {
	store, ok := h.Store.(forgetter)
	if !ok {
		return skip("the store has no Forget")
	}
	keys := map[string]inbox.Key{
		"plain":  {Consumer: consumer, MessageID: "id"},
		"hashed": {Consumer: consumer, MessageID: "id\x00"},
		"other":  {Consumer: "other", MessageID: "id"},
	}
	claims := make(map[string]inbox.Claim, len(keys))
	for name, key := range keys {
		stored, err := key.Normalize()
		if err != nil {
			return err
		}
		claims[name] = inbox.Claim{Key: stored, LockTimeout: time.Second}
		if err := process(ctx, h, claims[name], message.NewMessage("output", nil)); err != nil {
			return err
		}
	}
	for range 2 { // the second time there is nothing left
		for _, name := range []string{"plain", "hashed"} {
			if err := store.Forget(ctx, keys[name]); err != nil {
				return err
			}
		}
	}
	if err := store.Forget(ctx, inbox.Key{Consumer: consumer}); !errors.Is(err, inbox.ErrInvalidKey) {
		return errors.Join(errors.New("an invalid key is not ErrInvalidKey"), err)
	}
	if err := wantOutputs(ctx, h, claims["other"], 1); err != nil {
		return err
	}
	return errors.Join(process(ctx, h, claims["plain"]), process(ctx, h, claims["hashed"]))
}
