package storetest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync/atomic"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

func leavesNoConnection(ctx context.Context, h *Harness) error {
	if h.InUse == nil {
		return skip("the harness cannot count connections")
	}
	before := h.InUse()
	if err := everyEnding(ctx, h); err != nil {
		return err
	}
	// Pools may take a moment to close what is broken.
	return eventually(ctx, func() bool { return h.InUse() == before }, func() error {
		return fmt.Errorf("%d connections are still in use, of which the store has %d", h.InUse(), h.InUse()-before)
	})
}

func leavesNoGoroutine(ctx context.Context, h *Harness) error {
	if h.CloseIdle == nil {
		return skip("the harness cannot close idle connections, which may have goroutines")
	}
	// Goroutines inherit labels, so those that the store started can be told from those of other tests.
	value := strconv.FormatInt(harnesses.Add(1), 10)
	var err error
	pprof.Do(ctx, pprof.Labels(label, value), func(ctx context.Context) { err = everyEnding(ctx, h) })
	if err != nil {
		return err
	}
	h.CloseIdle()
	var left string
	return eventually(ctx, func() bool { left = labelled(value); return left == "" }, func() error {
		return errors.New("goroutines are left:\n" + left)
	})
}

// everyEnding lets deliveries end in all ways there are.
func everyEnding(ctx context.Context, h *Harness) error {
	ended, cancel := context.WithCancel(ctx)
	cancel()
	endings := []func() error{
		func() error { return process(ctx, h, claimOf("processed"), message.NewMessage("output", nil)) },
		func() error { return unclaimed(ctx, h.Store, claimOf("rolled back")) },
		func() error {
			return leave(ctx, h, "after an ended rollback", func(tx inbox.Tx) { _ = tx.Rollback(ended) })
		},
		func() error {
			return leave(ctx, h, "after an ended commit", func(tx inbox.Tx) { _ = tx.Commit(ended, nil) })
		},
		func() error {
			for range 20 { // more than a pool has
				if _, err := recorded(ctx, h.Store, claimOf("processed")); err != nil {
					return err
				}
				if tx, err := h.Store.Begin(ended, claimOf("never")); err == nil {
					return errors.Join(errors.New("begin with an ended context: no error"), tx.Rollback(ctx))
				}
			}
			return nil
		},
	}
	if h.Serial == "" {
		endings = append(endings,
			func() error { return cancelledWhileWaiting(ctx, h) }, // leaves the key that they share unclaimed
			func() error { return waitIsBounded(ctx, h) })
	}
	if h.Kill != nil {
		endings = append(endings, func() error {
			return leave(ctx, h, "killed", func(tx inbox.Tx) { _, _ = h.Kill(ctx, tx.Native()), tx.Commit(ctx, nil) })
		})
	}
	if marker, ok := h.Store.(inbox.OutputsMarker); ok {
		endings = append(endings, func() error {
			return marker.MarkOutputsPublished(ctx, []inbox.Key{claimOf("processed").Key})
		})
	}
	if store, ok := h.Store.(expirer); ok {
		endings = append(endings, func() error { _, err := store.DeleteExpired(ctx, 0, 100); return err })
	}
	for _, ending := range endings {
		if err := ending(); err != nil {
			return err
		}
	}
	return nil
}

// leave claims a key, and rolls back after something else.
func leave(ctx context.Context, h *Harness, id string, something func(inbox.Tx)) error {
	tx, err := own(ctx, h.Store, claimOf(id))
	if err != nil {
		return err
	}
	something(tx)
	return tx.Rollback(ctx)
}

const label = "storetest"

var harnesses atomic.Int64

// labelled returns the stacks of the goroutines with the label.
func labelled(value string) string {
	var profile bytes.Buffer
	if err := pprof.Lookup("goroutine").WriteTo(&profile, 1); err != nil {
		return err.Error()
	}
	var found []string
	for stack := range strings.SplitSeq(profile.String(), "\n\n") {
		if strings.Contains(stack, fmt.Sprintf("%q:%q", label, value)) {
			found = append(found, stack)
		}
	}
	return strings.Join(found, "\n\n")
}
