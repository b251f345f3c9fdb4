package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/watermill-inbox/inbox"
)

func claimsOnce(ctx context.Context, h *Harness) error {
	if err := process(ctx, h, claimOf("id")); err != nil {
		return err
	}
	for range 3 {
		if _, err := recorded(ctx, h.Store, claimOf("id")); err != nil {
			return err
		}
	}
	return wantEffects(ctx, h, "id")
}

func effectsComeWithTheClaim(ctx context.Context, h *Harness) error {
	tx, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	if err := h.Write(ctx, tx.Native(), "effect"); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	if h.Serial == "" {
		if err := wantEffects(ctx, h); err != nil {
			return errors.Join(fmt.Errorf("before the commit: %w", err), tx.Rollback(ctx))
		}
	}
	if err := tx.Commit(ctx, nil); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	if err := wantEffects(ctx, h, "effect"); err != nil {
		return err
	}
	_, err = recorded(ctx, h.Store, claimOf("id"))
	return err
}

func rollbackReleasesClaim(ctx context.Context, h *Harness) error {
	tx, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	if err := h.Write(ctx, tx.Native(), "undone"); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	if err := tx.Rollback(ctx); err != nil {
		return err
	}
	if err := wantEffects(ctx, h); err != nil {
		return err
	}
	if err := process(ctx, h, claimOf("id")); err != nil {
		return fmt.Errorf("after the rollback: %w", err)
	}
	return wantEffects(ctx, h, "id")
}

func rollbackIsIdempotent(ctx context.Context, h *Harness) error {
	tx, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	if err := errors.Join(tx.Rollback(ctx), tx.Rollback(ctx)); err != nil {
		return fmt.Errorf("rollback, twice: %w", err)
	}
	if err := tx.Commit(ctx, nil); err == nil {
		return errors.New("commit after the rollback: no error")
	}
	tx, err = own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	if err := tx.Commit(ctx, nil); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	if err := tx.Rollback(ctx); err != nil {
		return fmt.Errorf("rollback after the commit: %w", err)
	}
	_, err = recorded(ctx, h.Store, claimOf("id"))
	return err
}

func lostConnectionReleasesClaim(ctx context.Context, h *Harness) error {
	if h.Kill == nil {
		return skip("the harness cannot kill a connection")
	}
	tx, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	if err := errors.Join(h.Write(ctx, tx.Native(), "undone"), h.Kill(ctx, tx.Native())); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	if err := tx.Commit(ctx, nil); err == nil {
		return errors.New("commit on a killed connection: no error")
	}
	if err := tx.Rollback(ctx); err != nil {
		return fmt.Errorf("rollback on a killed connection: %w", err)
	}
	if err := unclaimed(ctx, h.Store, claimOf("id")); err != nil {
		return err
	}
	return wantEffects(ctx, h)
}

func concurrentClaimsRunOnce(ctx context.Context, h *Harness) error {
	const deliveries = 20
	var wg sync.WaitGroup
	var owners, records atomic.Int32
	errs := make([]error, deliveries)
	for i := range deliveries {
		wg.Go(func() {
			tx, err := begin(ctx, h.Store, claimOf("id"))
			if errors.Is(err, inbox.ErrInFlight) {
				return
			}
			if err != nil {
				errs[i] = err
				return
			}
			defer func() { errs[i] = errors.Join(errs[i], tx.Rollback(ctx)) }()
			if tx.Recorded() != nil {
				records.Add(1)
				return
			}
			owners.Add(1)
			time.Sleep(50 * time.Millisecond) // so that all others come in between
			errs[i] = errors.Join(h.Write(ctx, tx.Native(), "effect"), tx.Commit(ctx, nil))
		})
	}
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if owners.Load() != 1 {
		return fmt.Errorf("%d of %d deliveries owned the claim", owners.Load(), deliveries)
	}
	if err := wantEffects(ctx, h, "effect"); err != nil {
		return err
	}
	_, err := recorded(ctx, h.Store, claimOf("id"))
	return err
}

func waiterSkipsAfterCommit(ctx context.Context, h *Harness) error {
	first, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	second := beginAside(ctx, h.Store, claimOf("id"))
	err = errors.Join(stillWaits(second), first.Commit(ctx, nil))
	if err != nil {
		return errors.Join(err, first.Rollback(ctx))
	}
	r := <-second
	if r.err != nil {
		return fmt.Errorf("the second: %w", r.err)
	}
	if r.tx.Recorded() == nil {
		err = errors.New("the second owns the claim, although the first committed")
	}
	return errors.Join(err, r.tx.Rollback(ctx))
}

func waiterRunsAfterRollback(ctx context.Context, h *Harness) error {
	first, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	second := beginAside(ctx, h.Store, claimOf("id"))
	err = errors.Join(stillWaits(second), first.Rollback(ctx))
	if err != nil {
		return err
	}
	r := <-second
	if r.err != nil {
		return fmt.Errorf("the second: %w", r.err)
	}
	if r.tx.Recorded() != nil {
		err = errors.New("the second has a record, although the first rolled back")
	}
	return errors.Join(err, r.tx.Rollback(ctx))
}

func waitIsBounded(ctx context.Context, h *Harness) (err error) {
	first, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, first.Rollback(ctx)) }()
	claim := claimOf("id")
	claim.LockTimeout = 200 * time.Millisecond
	tx, err := h.Store.Begin(ctx, claim)
	if err == nil {
		return errors.Join(errors.New("a claim that is held: no error"), tx.Rollback(ctx))
	}
	if !errors.Is(err, inbox.ErrInFlight) {
		return fmt.Errorf("a claim that is held: %w, want ErrInFlight", err)
	}
	if err := process(ctx, h, claimOf("other")); err != nil {
		return fmt.Errorf("another key: %w", err)
	}
	return first.Commit(ctx, nil)
}

// odd are message IDs of which each two differ.
var odd = []string{
	"abc", "ABC", "Abc", "abc ", " abc", "abc\t", "äbc", "a\u0308bc", "abc\u200b", "ABC ", "ßbc", "ssbc", "1", "01", "1.0", "1e0",
	"'; DROP TABLE inbox; --", `"`, "`", `\`, "%", "_", "?", "$1", "NULL", "null", "\n", "\r\n", "🦀", "🦁", "ａｂｃ",
	strings.Repeat("x", inbox.MaxKeyLength), strings.Repeat("x", inbox.MaxKeyLength-1) + "y", strings.Repeat("é", inbox.MaxKeyLength/2),
}

func keysAreExact(ctx context.Context, h *Harness) error {
	for _, id := range odd {
		if err := process(ctx, h, claimOf(id)); err != nil {
			return err
		}
	}
	for _, id := range odd {
		if _, err := recorded(ctx, h.Store, claimOf(id)); err != nil {
			return err
		}
	}
	return wantEffects(ctx, h, odd...)
}

func keysOfAnyBytes(ctx context.Context, h *Harness) error {
	for _, id := range []string{
		"\x00", "a\x00b", "a", "\xff", "\xfe", "\xc3\x28", strings.Repeat("x", 10_000), strings.Repeat("x", 10_001),
		"sha256:", "sha256:" + strings.Repeat("0", 64),
	} {
		key, err := inbox.Key{Consumer: consumer + id, MessageID: id}.Normalize()
		if err != nil {
			return err
		}
		claim := inbox.Claim{Key: key, LockTimeout: time.Second}
		tx, err := own(ctx, h.Store, claim)
		if err != nil {
			return err
		}
		if err := tx.Commit(ctx, nil); err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		if _, err := recorded(ctx, h.Store, claim); err != nil {
			return err
		}
	}
	return nil
}

func consumersAreIndependent(ctx context.Context, h *Harness) error {
	keys := []inbox.Key{
		{Consumer: "ab", MessageID: "c"},
		{Consumer: "a", MessageID: "bc"},
		{Consumer: "abc", MessageID: "c"},
		{Consumer: "AB", MessageID: "c"},
		{Consumer: "ab ", MessageID: "c"},
	}
	for _, key := range keys {
		if err := process(ctx, h, inbox.Claim{Key: key, LockTimeout: time.Second}); err != nil {
			return err
		}
	}
	return wantEffects(ctx, h, "c", "bc", "c", "c", "c")
}

func storesShareClaims(ctx context.Context, h *Harness) error {
	if h.Another == nil {
		return skip("the harness has no other store")
	}
	other, err := h.Another()
	if err != nil {
		return err
	}
	if err := process(ctx, h, claimOf("id")); err != nil {
		return err
	}
	if _, err := recorded(ctx, other, claimOf("id")); err != nil {
		return err
	}
	if h.Serial != "" {
		return nil
	}
	tx, err := own(ctx, other, claimOf("held"))
	if err != nil {
		return err
	}
	claim := claimOf("held")
	claim.LockTimeout = 200 * time.Millisecond
	second, err := h.Store.Begin(ctx, claim)
	if err == nil {
		return errors.Join(errors.New("a claim that another store holds: no error"), second.Rollback(ctx), tx.Rollback(ctx))
	}
	return tx.Rollback(ctx)
}

func classifiesErrors(_ context.Context, h *Harness) error {
	classifier, ok := h.Store.(inbox.TransientClassifier)
	if !ok {
		return skip("the store classifies no errors")
	}
	for _, err := range []error{
		nil, errors.New("x"), context.Canceled, inbox.ErrInFlight, fmt.Errorf("wrapped: %w", inbox.ErrInFlight),
		errors.Join(errors.New("a"), errors.New("b")),
	} {
		if classifier.IsTransient(err) {
			return fmt.Errorf("counts as transient: %w", err)
		}
	}
	return nil
}

func leavesNothingOver(ctx context.Context, h *Harness) error {
	if h.InUse == nil {
		return skip("the harness cannot count connections")
	}
	if err := errors.Join(process(ctx, h, claimOf("a")), unclaimed(ctx, h.Store, claimOf("b"))); err != nil {
		return err
	}
	for range 20 {
		if _, err := recorded(ctx, h.Store, claimOf("a")); err != nil {
			return err
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		if tx, err := h.Store.Begin(ended, claimOf("c")); err == nil {
			return errors.Join(errors.New("begin with an ended context: no error"), tx.Rollback(ctx))
		}
	}
	for h.InUse() != 0 { // pools may take a moment to close what is broken
		select {
		case <-ctx.Done():
			return fmt.Errorf("%d connections are still in use", h.InUse())
		case <-time.After(5 * time.Millisecond):
		}
	}
	return nil
}
