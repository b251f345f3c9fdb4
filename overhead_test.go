package inbox_test

import (
	"context"
	"runtime"
	"strconv"
	"testing"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
)

// idleStore does nothing, so that what is left is the middleware's own cost.
type idleStore struct{}

func (*idleStore) Begin(context.Context, inbox.Claim) (inbox.Tx, error) { return idleTx{}, nil }

type idleTx struct{}

func (idleTx) Recorded() *inbox.Record                          { return nil }
func (idleTx) Native() any                                      { return nil }
func (idleTx) Commit(context.Context, []*message.Message) error { return nil }
func (idleTx) Rollback(context.Context) error                   { return nil }
func idle(*message.Message) ([]*message.Message, error)         { return nil, nil }

// maxAllocations is what the middleware may allocate per message, over what the store does.
const maxAllocations = 12

func TestMiddlewareAllocations(t *testing.T) {
	h := newDeduplicator(t, &idleStore{}).Middleware(idle)
	msg := newMessage("id")
	got := testing.AllocsPerRun(1000, func() { _, _ = h(msg) })
	if got > maxAllocations {
		t.Errorf("%v allocations per message, want at most %d", got, maxAllocations)
	}
}

// TestNothingIsKeptPerMessage has a million messages leave nothing behind in memory.
func TestNothingIsKeptPerMessage(t *testing.T) {
	h := newDeduplicator(t, &idleStore{}).Middleware(idle)
	heap := func(messages int) uint64 {
		for i := range messages {
			_, _ = h(message.NewMessage(strconv.Itoa(i), nil))
		}
		runtime.GC()
		var stats runtime.MemStats
		runtime.ReadMemStats(&stats)
		return stats.HeapAlloc
	}
	const slack = 1 << 20
	if before, after := heap(1000), heap(1_000_000); after > before+slack {
		t.Errorf("the heap grew from %d to %d bytes", before, after)
	}
}

func BenchmarkMiddleware(b *testing.B) {
	for _, withInbox := range []bool{false, true} {
		name := "inbox=off"
		h := message.HandlerFunc(idle)
		if withInbox {
			dedup, err := inbox.NewDeduplicator(inbox.Config{Store: &idleStore{}, Consumer: consumer})
			if err != nil {
				b.Fatal(err)
			}
			name, h = "inbox=on", dedup.Middleware(idle)
		}
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			msg := newMessage("id")
			for b.Loop() {
				_, _ = h(msg)
			}
		})
	}
}
