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

func cancelledBeforeBegin(ctx context.Context, h *Harness) error {
	canceled, cancel := context.WithCancel(ctx)
	cancel()
	late, cancel := context.WithDeadline(ctx, time.Now())
	defer cancel()
	for _, ended := range []context.Context{canceled, late} {
		tx, err := h.Store.Begin(ended, claimOf("id")) //nolint:contextcheck // inherited, in a slice
		if err == nil {
			return errors.Join(fmt.Errorf("%w: no error", ended.Err()), tx.Rollback(ctx))
		}
		if !errors.Is(err, ended.Err()) {
			return fmt.Errorf("%w is not %w", err, ended.Err())
		}
		if err := unclaimed(ctx, h.Store, claimOf("id")); err != nil {
			return err
		}
	}
	return nil
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
	case <-time.After(claimOf("id").LockTimeout / 2):
		return errors.Join(errors.New("the wait goes on"), first.Rollback(ctx))
	}
	if err := first.Rollback(ctx); err != nil {
		return err
	}
	return unclaimed(ctx, h.Store, claimOf("id"))
}

func cancelledInTheHandler(ctx context.Context, h *Harness) error {
	for _, hide := range []bool{false, true} { // the handler hides the error, so that there is a commit
		claim := claimOf(fmt.Sprintf("hide=%t", hide))
		tx, err := own(ctx, h.Store, claim)
		if err != nil {
			return err
		}
		if err := h.Write(ctx, tx.Native(), claim.Key.MessageID); err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		ended, cancel := context.WithCancel(ctx)
		cancel()
		if err := h.Write(ended, tx.Native(), "late"); err == nil {
			return errors.Join(errors.New("a write with an ended context: no error"), tx.Rollback(ctx))
		}
		var commitErr error
		if hide {
			commitErr = tx.Commit(ctx, nil)
		}
		if err := tx.Rollback(ctx); err != nil {
			return fmt.Errorf("rollback: %w", err)
		}
		committed, err := together(ctx, h, claim)
		if err != nil {
			return err
		}
		if committed != (hide && commitErr == nil) {
			return fmt.Errorf("committed: %t, although Commit was called: %t, and returned: %w", committed, hide, commitErr)
		}
	}
	effects, err := h.Effects(ctx)
	if slices.Contains(effects, "late") {
		return errors.New("the effect of a write that failed is there")
	}
	return err
}

// cancelledAnywhere ends contexts at moments from the beginning to the end of a delivery, as long as one takes here.
func cancelledAnywhere(ctx context.Context, h *Harness) error {
	const deliveries = 40
	for i := range deliveries {
		// The one before may have cost a connection, and how long one takes is different each time.
		var whole time.Duration
		for j := range 2 {
			began := time.Now()
			if err := process(ctx, h, claimOf(fmt.Sprint("undisturbed ", i, j))); err != nil {
				return err
			}
			whole = time.Since(began)
		}
		claim := claimOf(fmt.Sprint(i))
		short, cancel := context.WithCancel(ctx) // without a deadline, which LockTimeout would have to end before
		timer := time.AfterFunc(whole*time.Duration(3*i)/(2*deliveries), cancel)
		var outputs []*message.Message
		if i%2 == 1 {
			outputs = append(outputs, message.NewMessage("output", nil))
		}
		delivered, err := deliver(ctx, short, h, claim, outputs)
		timer.Stop()
		cancel()
		if err != nil {
			return err
		}
		committed, err := together(ctx, h, claim)
		if err != nil {
			return err
		}
		if delivered && !committed {
			return fmt.Errorf("%q: Commit returned nil, and nothing is committed", claim.Key)
		}
	}
	return nil
}

// deliver processes a message with a context that may end. It reports whether Commit returned nil.
func deliver(ctx, short context.Context, h *Harness, claim inbox.Claim, outputs []*message.Message) (bool, error) {
	tx, err := h.Store.Begin(short, claim)
	if err != nil {
		if short.Err() == nil || !errors.Is(err, context.Canceled) {
			return false, fmt.Errorf("begin %q: %w", claim.Key, err)
		}
		return false, nil
	}
	err = h.Write(short, tx.Native(), claim.Key.MessageID)
	if err == nil {
		err = tx.Commit(short, outputs)
		if err != nil && short.Err() != nil && !errors.Is(err, context.Canceled) {
			return false, errors.Join(fmt.Errorf("commit: %w is not context.Canceled", err), tx.Rollback(ctx))
		}
	}
	if rollbackErr := tx.Rollback(ctx); rollbackErr != nil {
		return false, fmt.Errorf("rollback: %w", rollbackErr)
	}
	if err != nil && short.Err() == nil {
		return false, err
	}
	return err == nil, nil
}

func transactionOutlivesBegin(ctx context.Context, h *Harness) error {
	short, cancel := context.WithCancel(ctx)
	defer cancel()
	tx, err := own(short, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	cancel()
	if err := h.Write(ctx, tx.Native(), "id"); err != nil {
		return errors.Join(fmt.Errorf("write: %w", err), tx.Rollback(ctx))
	}
	if err := tx.Commit(ctx, nil); err != nil {
		return errors.Join(fmt.Errorf("commit: %w", err), tx.Rollback(ctx))
	}
	committed, err := together(ctx, h, claimOf("id"))
	if err == nil && !committed {
		return errors.New("Commit returned nil, and nothing is committed")
	}
	return err
}

func commitWithEndedContext(ctx context.Context, h *Harness) error {
	ended, cancel := context.WithCancel(ctx)
	cancel()
	for id, outputs := range map[string][]*message.Message{"without": nil, "with": {message.NewMessage("output", nil)}} {
		tx, err := own(ctx, h.Store, claimOf(id))
		if err != nil {
			return err
		}
		if err := h.Write(ctx, tx.Native(), id); err != nil {
			return errors.Join(err, tx.Rollback(ctx))
		}
		commitErr := tx.Commit(ended, outputs)
		if err := tx.Rollback(ctx); err != nil {
			return fmt.Errorf("rollback after the commit: %w", err)
		}
		committed, err := together(ctx, h, claimOf(id))
		if err != nil {
			return err
		}
		if commitErr == nil && !committed {
			return errors.New("Commit returned nil, and nothing is committed")
		}
		if commitErr != nil && !errors.Is(commitErr, context.Canceled) {
			return fmt.Errorf("%w is not context.Canceled", commitErr)
		}
	}
	return nil
}
