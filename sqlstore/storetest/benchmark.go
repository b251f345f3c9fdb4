package storetest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

// Benchmark measures what deliveries cost through an [inbox.Deduplicator] whose handler writes one effect, in
// sub-benchmarks that benchstat compares. An operation is a message:
//
//   - delivery=bare: the handler in a transaction without an inbox, if the harness has a Baseline
//   - delivery=first: a message that was never delivered before
//   - delivery=first-1KB: one whose handler returns a message of 1 KB, which is acknowledged, and so marked as published
//   - delivery=duplicate: a message that was processed before
//
// Each is run with workers=1 and workers=8, who wait for the database side by side: the harness needs as many connections,
// and some more. What is not run side by side on a machine with neighbours is not comparable: use -count.
func Benchmark(b *testing.B, newHarness func(b *testing.B) *Harness) {
	b.Helper()
	kb := message.NewMessage("output", make([]byte, 1024))
	for _, way := range []struct {
		name    string
		prepare func(*testing.B, *Harness) (deliver func(id string) error)
		ids     int // how many different ones, 0: no end of them
	}{
		{"bare", bare, 0},
		{"first", throughInbox(), 0},
		{"first-1KB", throughInbox(kb), 0},
		{"duplicate", throughInbox(), duplicates},
	} {
		for _, workers := range []int{1, 8} {
			b.Run(fmt.Sprintf("delivery=%s/workers=%d", way.name, workers), func(b *testing.B) {
				measure(b, workers, way.ids, way.prepare(b, newHarness(b)))
			})
		}
	}
}

// duplicates is how many messages are delivered again and again. More than workers, so that they do not meet.
const duplicates = 64

func bare(b *testing.B, h *Harness) func(string) error {
	b.Helper()
	if h.Baseline == nil {
		b.Skip("the harness has no baseline")
	}
	return func(id string) error { return h.Baseline(b.Context(), id) }
}

var errNoTransaction = errors.New("the handler has no transaction")

func throughInbox(outputs ...*message.Message) func(*testing.B, *Harness) func(string) error {
	return func(b *testing.B, h *Harness) func(string) error {
		b.Helper()
		ctx := b.Context()
		dedup, err := inbox.NewDeduplicator(inbox.Config{Store: h.Store, Consumer: consumer})
		if err != nil {
			b.Fatal(err)
		}
		b.Cleanup(func() {
			if err := dedup.Close(context.WithoutCancel(ctx)); err != nil {
				b.Error(err)
			}
		})
		handler := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			native, ok := inbox.TxFromContext[any](msg.Context())
			if !ok {
				return nil, errNoTransaction
			}
			return outputs, h.Write(msg.Context(), native, msg.UUID)
		})
		return func(id string) error {
			msg := message.NewMessageWithContext(ctx, id, nil)
			if _, err := handler(msg); err != nil {
				return err
			}
			msg.Ack() // as the router does
			return nil
		}
	}
}

// measure has workers deliver messages.
func measure(b *testing.B, workers, ids int, deliver func(id string) error) {
	b.Helper()
	next := 0
	number := func() int {
		next++
		if ids > 0 {
			return next % ids
		}
		return next
	}
	var failure atomic.Pointer[error]
	deliverAll := func(more func() bool) {
		var wg sync.WaitGroup
		numbers := make(chan int)
		for range workers {
			wg.Go(func() {
				for n := range numbers {
					if err := deliver(fmt.Sprintf("message-%09d", n)); err != nil {
						failure.CompareAndSwap(nil, &err)
					}
				}
			})
		}
		for more() && failure.Load() == nil {
			numbers <- number()
		}
		close(numbers)
		wg.Wait()
	}

	warm := max(ids, 8*workers) // which opens the connections, and processes what is to be a duplicate
	deliverAll(func() bool { return next < warm })
	b.ReportAllocs()
	deliverAll(b.Loop)
	if err := failure.Load(); err != nil {
		b.Fatal(*err)
	}
}
