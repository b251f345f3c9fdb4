package storetest

import (
	"context"
	"errors"
	"fmt"

	"github.com/ThreeDotsLabs/watermill/message"

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
	if err := h.Write(ctx, tx.Native(), "id"); err != nil {
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
	committed, err := together(ctx, h, claimOf("id"))
	if err == nil && !committed {
		return errors.New("Commit returned nil, and nothing is committed")
	}
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

func rollbackWithEndedContext(ctx context.Context, h *Harness) error {
	tx, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	if err := h.Write(ctx, tx.Native(), "undone"); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	ended, cancel := context.WithCancel(ctx)
	cancel()
	_ = tx.Rollback(ended) // its connection may be gone, and the transaction with it
	if err := tx.Rollback(ctx); err != nil {
		return fmt.Errorf("the second rollback: %w", err)
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
	if tx, err = own(ctx, h.Store, claimOf("id")); err != nil {
		return err
	}
	if err := tx.Commit(ctx, nil); err != nil {
		return errors.Join(err, tx.Rollback(ctx))
	}
	if err := tx.Rollback(ctx); err != nil {
		return fmt.Errorf("rollback after the commit: %w", err)
	}
	if tx, err = begin(ctx, h.Store, claimOf("id")); err != nil {
		return err
	}
	if tx.Recorded() == nil {
		return errors.Join(errors.New("the rollback undid the commit"), tx.Rollback(ctx))
	}
	if err := errors.Join(tx.Rollback(ctx), tx.Rollback(ctx)); err != nil {
		return fmt.Errorf("rollback of a duplicate, twice: %w", err)
	}
	return nil
}

func lostConnectionReleasesClaim(ctx context.Context, h *Harness) error {
	if h.Kill == nil {
		return skip("the harness cannot kill a connection")
	}
	for _, outputs := range [][]*message.Message{nil, {message.NewMessage("output", nil)}} {
		tx, err := own(ctx, h.Store, claimOf("id"))
		if err != nil {
			return err
		}
		if err := errors.Join(h.Write(ctx, tx.Native(), "undone"), h.Kill(ctx, tx.Native())); err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		if err := tx.Commit(ctx, outputs); err == nil {
			return errors.New("commit on a killed connection: no error")
		}
		if err := tx.Rollback(ctx); err != nil {
			return fmt.Errorf("rollback on a killed connection: %w", err)
		}
		if detector, ok := tx.(inbox.LossDetector); ok && !detector.ConnectionLost() {
			return errors.New("ConnectionLost is false on a killed connection")
		}
	}
	tx, err := own(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	if err := tx.Rollback(ctx); err != nil {
		return err
	}
	if detector, ok := tx.(inbox.LossDetector); ok && detector.ConnectionLost() {
		return errors.New("ConnectionLost is true after a mere rollback")
	}
	return wantEffects(ctx, h)
}

func commitProvesTheClaim(ctx context.Context, h *Harness) error {
	if h.Undo == nil {
		return skip("the harness cannot undo a transaction behind the store's back")
	}
	for _, outputs := range [][]*message.Message{nil, {message.NewMessage("output", nil)}} {
		tx, err := own(ctx, h.Store, claimOf("id"))
		if err != nil {
			return err
		}
		if err := errors.Join(h.Write(ctx, tx.Native(), "undone"), h.Undo(ctx, tx.Native())); err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		if err := tx.Commit(ctx, outputs); err == nil {
			return fmt.Errorf("commit of what was undone, with %d outputs: no error", len(outputs))
		}
		if err := tx.Rollback(ctx); err != nil {
			return fmt.Errorf("rollback of what was undone: %w", err)
		}
		if err := unclaimed(ctx, h.Store, claimOf("id")); err != nil {
			return err
		}
	}
	return wantEffects(ctx, h)
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
