package storetest

import (
	"context"
	"errors"
	"fmt"
	"time"
)

func cancelledBeforeBegin(ctx context.Context, h *Harness) error {
	ended, cancel := context.WithCancel(ctx)
	cancel()
	tx, err := h.Store.Begin(ended, claimOf("id"))
	if err == nil {
		return errors.Join(errors.New("no error"), tx.Rollback(ctx))
	}
	if !errors.Is(err, context.Canceled) {
		return fmt.Errorf("%w is not context.Canceled", err)
	}
	return unclaimed(ctx, h.Store, claimOf("id"))
}

func cancelledWhileWaiting(ctx context.Context, h *Harness) error {
	first, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	waiting, cancel := context.WithCancel(ctx)
	defer cancel()
	second := beginAside(waiting, h.Store, claimOf("id"))
	if err := stillWaits(second); err != nil {
		return errors.Join(err, first.Rollback(ctx))
	}
	cancel()
	select {
	case r := <-second:
		if r.err == nil {
			return errors.Join(errors.New("the wait ended without an error"), r.tx.Rollback(ctx), first.Rollback(ctx))
		}
		if !errors.Is(r.err, context.Canceled) {
			return errors.Join(fmt.Errorf("%w is not context.Canceled", r.err), first.Rollback(ctx))
		}
	case <-time.After(10 * time.Second):
		return errors.Join(errors.New("the wait goes on"), first.Rollback(ctx))
	}
	if err := first.Rollback(ctx); err != nil {
		return err
	}
	return unclaimed(ctx, h.Store, claimOf("id"))
}

func transactionOutlivesBegin(ctx context.Context, h *Harness) error {
	short, cancel := context.WithCancel(ctx)
	defer cancel()
	tx, err := own(short, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	cancel()
	if err := h.Write(ctx, tx.Native(), "effect"); err != nil {
		return errors.Join(fmt.Errorf("write: %w", err), tx.Rollback(ctx))
	}
	if err := tx.Commit(ctx, nil); err != nil {
		return errors.Join(fmt.Errorf("commit: %w", err), tx.Rollback(ctx))
	}
	if _, err := recorded(ctx, h.Store, claimOf("id")); err != nil {
		return err
	}
	return wantEffects(ctx, h, "effect")
}

func commitWithEndedContext(ctx context.Context, h *Harness) error {
	tx, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	if err := h.Write(ctx, tx.Native(), "effect"); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	commitErr := tx.Commit(ended, nil)
	if err := tx.Rollback(ctx); err != nil {
		return fmt.Errorf("rollback after the commit: %w", err)
	}
	effects, err := h.Effects(ctx)
	if err != nil {
		return err
	}
	after, err := begin(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	committed := after.Recorded() != nil
	if err := after.Rollback(ctx); err != nil {
		return err
	}
	if committed != (len(effects) == 1) {
		return fmt.Errorf("claim committed: %t, effects: %q", committed, effects)
	}
	if commitErr == nil && !committed {
		return errors.New("Commit returned nil, and nothing is committed")
	}
	return nil
}

func nativeIsDeadAfterwards(ctx context.Context, h *Harness) error {
	for _, commit := range []bool{true, false} {
		tx, err := own(ctx, h.Store, claimOf(fmt.Sprint(commit)))
		if err != nil {
			return err
		}
		native := tx.Native()
		if commit {
			err = tx.Commit(ctx, nil)
		}
		if err := errors.Join(err, tx.Rollback(ctx)); err != nil {
			return err
		}
		if err := h.Write(ctx, native, "late"); err == nil {
			return fmt.Errorf("a write after the end (commit: %t): no error", commit)
		}
	}
	return wantEffects(ctx, h)
}
