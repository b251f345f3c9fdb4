package pgxstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill"
	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/jackc/pgx/v5/stdlib"

	"github.com/watermill-inbox/inbox"
)

// benchRound is how many messages a worker processes one way before it is the next way's turn.
const benchRound = 25

// BenchmarkDelivery processes messages in several ways by turns, since only what ran side by side can be compared on a
// machine with neighbours. The handler is one UPDATE, of a row for each worker. An iteration is a round of each way:
//
//   - bare: the handler in a transaction of the pool, without deduplication
//   - inbox: this package; inbox-1KB: with a handler that returns a message of 1 KB
//   - insert-or-skip: BEGIN, insert the ID, the handler, COMMIT, over pgx
//   - select-first: BEGIN, look for the ID, insert it, the handler, COMMIT, over database/sql
//   - duplicate and duplicate-select-first: the same messages once more
//
// The metrics are microseconds per message, for each worker, and one way's throughput over another's. What they come to
// depends on how long the server takes to flush its log, so the server's fsync must be on for figures that mean something.
func BenchmarkDelivery(b *testing.B) {
	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			w := newWays(b, workers)
			ways := []struct {
				name    string
				process func(ctx context.Context, worker int, id string) error
			}{
				{"bare", w.bare},
				{"inbox", w.inbox(w.outputs(0))},
				{"inbox-1KB", w.inbox(w.outputs(1024))},
				{"insert-or-skip", w.insertOrSkip},
				{"select-first", w.selectFirst},
				{"duplicate", w.inbox(nil)},
				{"duplicate-select-first", w.selectFirst},
			}
			elapsed := make(map[string]time.Duration)
			round := func() {
				ids := make([]string, workers*benchRound)
				for i := range ids {
					ids[i] = watermill.NewUUID()
				}
				for _, way := range ways {
					elapsed[way.name] += w.measure(b, ids, way.process)
				}
			}
			round()
			clear(elapsed) // of the warming up
			for b.Loop() {
				round()
			}

			for _, way := range ways {
				b.ReportMetric(float64(elapsed[way.name].Microseconds())/float64(b.N*benchRound), way.name+"-µs")
			}
			for _, pair := range [][2]string{
				{"inbox", "bare"}, {"inbox", "insert-or-skip"}, {"inbox", "select-first"}, {"inbox-1KB", "inbox"},
				{"duplicate", "duplicate-select-first"},
			} {
				b.ReportMetric(elapsed[pair[1]].Seconds()/elapsed[pair[0]].Seconds(), pair[0]+"/"+pair[1])
			}
			b.ReportMetric(0, "ns/op") // a sum of different things
		})
	}
}
