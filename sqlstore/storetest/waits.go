package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/watermill-inbox/inbox"
)

func concurrentClaimsRunOnce(ctx context.Context, h *Harness) error {
	const deliveries = 20
	stores := []inbox.Store{h.Store}
	if h.Another != nil {
		another, err := h.Another()
		if err != nil {
			return err
		}
		stores = append(stores, another)
	}
	var (
		wg     sync.WaitGroup
		owners atomic.Int32
		start  = make(chan struct{})
		errs   = make([]error, deliveries)
	)
	for i := range deliveries {
		wg.Go(func() {
			<-start
			tx, err := begin(ctx, stores[i%len(stores)], claimOf("id"))
			if errors.Is(err, inbox.ErrInFlight) {
				return
			}
			if err != nil {
				errs[i] = err
				return
			}
			defer func() { errs[i] = errors.Join(errs[i], tx.Rollback(ctx)) }()
			if tx.Recorded() != nil {
				return
			}
			owners.Add(1)
			time.Sleep(moment) // for the others to come in between, which they must not
			errs[i] = errors.Join(h.Write(ctx, tx.Native(), "id"), tx.Commit(ctx, nil))
		})
	}
	close(start)
	wg.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	if owners.Load() != 1 {
		return fmt.Errorf("%d of %d deliveries owned the claim", owners.Load(), deliveries)
	}
	if _, err := recorded(ctx, h.Store, claimOf("id")); err != nil {
		return err
	}
	return wantEffects(ctx, h, "id")
}

func waiterSkipsAfterCommit(ctx context.Context, h *Harness) error {
	first, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	second := beginAside(ctx, h.Store, claimOf("id"))
	if err := errors.Join(stillWaits(second), first.Commit(ctx, nil)); err != nil {
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
	if err := errors.Join(stillWaits(second), first.Rollback(ctx)); err != nil {
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

func waiterHoldsUpNoOtherKey(ctx context.Context, h *Harness) error {
	first, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	second := beginAside(ctx, h.Store, claimOf("id"))
	if err := stillWaits(second); err != nil {
		return errors.Join(err, first.Rollback(ctx))
	}
	other := process(ctx, h, claimOf("other"))
	if err := stillWaits(second); err != nil {
		return errors.Join(err, other, first.Rollback(ctx))
	}
	err = errors.Join(other, first.Rollback(ctx))
	r := <-second
	if r.err != nil {
		return errors.Join(err, fmt.Errorf("the second: %w", r.err))
	}
	return errors.Join(err, r.tx.Rollback(ctx))
}

func waitIsBounded(ctx context.Context, h *Harness) error {
	first, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	err = inFlight(ctx, h.Store, claimOf("id"))
	err = errors.Join(err, h.Write(ctx, first.Native(), "id"), first.Commit(ctx, nil))
	if err = errors.Join(err, first.Rollback(ctx)); err != nil {
		return err
	}
	_, err = recorded(ctx, h.Store, claimOf("id"))
	return err
}

// inFlight checks that somebody else holds a claim.
func inFlight(ctx context.Context, store inbox.Store, claim inbox.Claim) error {
	claim.LockTimeout = 200 * time.Millisecond
	tx, err := store.Begin(ctx, claim)
	if err == nil {
		return errors.Join(fmt.Errorf("%q is held, and can be claimed", claim.Key), tx.Rollback(ctx))
	}
	if !errors.Is(err, inbox.ErrInFlight) {
		return fmt.Errorf("%q is held: %w, want ErrInFlight", claim.Key, err)
	}
	return nil
}

func waitLeavesTheSessionAlone(ctx context.Context, h *Harness) error {
	if h.LockTimeout == nil {
		return skip("the harness does not tell the session's lock timeout")
	}
	want, err := h.LockTimeout(ctx, nil)
	if err != nil {
		return err
	}
	for _, id := range []string{"first", "second"} { // likely on one connection
		claim := claimOf(id)
		claim.LockTimeout = 7 * time.Second // another one than any default
		tx, err := own(ctx, h.Store, claim)
		if err != nil {
			return err
		}
		got, err := h.LockTimeout(ctx, tx.Native())
		if err := errors.Join(err, tx.Commit(ctx, nil), tx.Rollback(ctx)); err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("in the handler, the session's lock timeout is %s, want %s", got, want)
		}
		if _, err := recorded(ctx, h.Store, claimOf(id)); err != nil {
			return err
		}
		if got, err = h.LockTimeout(ctx, nil); err != nil {
			return err
		}
		if got != want {
			return fmt.Errorf("afterwards, the session's lock timeout is %s, want %s", got, want)
		}
	}
	return nil
}
