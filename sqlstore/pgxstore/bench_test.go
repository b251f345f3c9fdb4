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
// machine with neighbours. The handler is one UPDATE. An iteration is a round of each way:
//
//   - bare: the handler in a transaction of the pool, without deduplication
//   - by-hand: BEGIN, look for the ID, insert it, the handler, COMMIT, through database/sql
//   - inbox
//   - inbox-1KB: a handler that returns a message of 1 KB
//   - duplicate and duplicate-by-hand: what inbox and by-hand processed, once more
//
// The metrics are microseconds per message, for each worker, and the throughput of one way over that of another.
func BenchmarkDelivery(b *testing.B) {
	for _, workers := range []int{1, 8} {
		b.Run(fmt.Sprintf("workers=%d", workers), func(b *testing.B) {
			w := newWays(b, workers)
			var bare, byHand, inbox, inbox1KB, duplicate, duplicateByHand time.Duration
			round := func() {
				ids := make([]string, workers*benchRound)
				for i := range ids {
					ids[i] = watermill.NewUUID()
				}
				bare += w.measure(b, ids, w.bare)
				inbox += w.measure(b, ids, w.inbox(nil))
				byHand += w.measure(b, ids, w.byHand)
				duplicate += w.measure(b, ids, w.inbox(nil))
				duplicateByHand += w.measure(b, ids, w.byHand)
				for i := range ids {
					ids[i] = watermill.NewUUID()
				}
				inbox1KB += w.measure(b, ids, w.inbox(make([]byte, 1024)))
			}
			round() // warms up
			bare, byHand, inbox, inbox1KB, duplicate, duplicateByHand = 0, 0, 0, 0, 0, 0
			for b.Loop() {
				round()
			}

			for name, elapsed := range map[string]time.Duration{
				"bare-µs": bare, "by-hand-µs": byHand, "inbox-µs": inbox, "inbox-1KB-µs": inbox1KB, "duplicate-µs": duplicate,
				"duplicate-by-hand-µs": duplicateByHand,
			} {
				b.ReportMetric(float64(elapsed.Microseconds())/float64(b.N*benchRound), name)
			}
			b.ReportMetric(bare.Seconds()/inbox.Seconds(), "inbox/bare")
			b.ReportMetric(byHand.Seconds()/inbox.Seconds(), "inbox/by-hand")
			b.ReportMetric(inbox.Seconds()/inbox1KB.Seconds(), "inbox-1KB/inbox")
			b.ReportMetric(duplicateByHand.Seconds()/duplicate.Seconds(), "duplicate/duplicate-by-hand")
			b.ReportMetric(0, "ns/op") // a sum of different things
		})
	}
}

// ways are the ways to process a message.
type ways struct {
	workers int
	pool    *pgxpool.Pool
	db      *sql.DB
	dedup   *inbox.Deduplicator

	handler, seen, remember string
}

func newWays(b *testing.B, workers int) *ways {
	b.Helper()
	store, pool, table := newStore(b, pgx.QueryExecModeCacheStatement)
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store, Consumer: "orders"})
	if err != nil {
		b.Fatal(err)
	}
	w := &ways{
		workers: workers, pool: pool, db: stdlib.OpenDBFromPool(pool), dedup: dedup,
		handler:  "UPDATE " + table + "_stock SET quantity = quantity + 1 WHERE worker = $1",
		seen:     "SELECT EXISTS (SELECT FROM " + table + "_by_hand WHERE consumer = $1 AND message_id = $2)",
		remember: "INSERT INTO " + table + "_by_hand VALUES ($1, $2, now())",
	}
	b.Cleanup(func() {
		_ = w.db.Close()
		if _, err := pool.Exec(context.Background(), "DROP TABLE IF EXISTS "+table+"_stock, "+table+"_by_hand"); err != nil {
			b.Error(err)
		}
	})
	exec(b, pool, "CREATE TABLE "+table+"_stock (worker INTEGER PRIMARY KEY, quantity BIGINT NOT NULL)")
	exec(b, pool, "INSERT INTO "+table+"_stock SELECT generate_series(0, $1), 0", workers-1)
	exec(b, pool, "CREATE TABLE "+table+"_by_hand (consumer TEXT, message_id TEXT, received_at TIMESTAMPTZ NOT NULL, "+
		"PRIMARY KEY (consumer, message_id))")
	exec(b, pool, "CREATE INDEX ON "+table+"_by_hand (received_at)")
	return w
}

// measure returns how long the workers took to process the messages, each its share.
func (w *ways) measure(b *testing.B, ids []string, process func(ctx context.Context, worker int, id string) error) time.Duration {
	b.Helper()
	var running sync.WaitGroup
	began := time.Now()
	for worker := range w.workers {
		running.Go(func() {
			for _, id := range ids[worker*benchRound:][:benchRound] {
				if err := process(b.Context(), worker, id); err != nil {
					b.Error(err)
					return
				}
			}
		})
	}
	running.Wait()
	return time.Since(began)
}

func (w *ways) bare(ctx context.Context, worker int, _ string) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, w.handler, worker)
		return err
	})
}

func (w *ways) inbox(output []byte) func(ctx context.Context, worker int, id string) error {
	return func(ctx context.Context, worker int, id string) error {
		msg := message.NewMessage(id, nil)
		msg.SetContext(ctx)
		_, err := w.dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			tx, _ := inbox.TxFromContext[pgx.Tx](msg.Context())
			if _, err := tx.Exec(msg.Context(), w.handler, worker); err != nil || output == nil {
				return nil, err
			}
			return []*message.Message{message.NewMessage(watermill.NewUUID(), output)}, nil
		})(msg)
		return err
	}
}

// byHand is what people write: it looks first, and so has a race that its primary key turns into an error.
func (w *ways) byHand(ctx context.Context, worker int, id string) error {
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	var seen bool
	if err := tx.QueryRowContext(ctx, w.seen, "orders", id).Scan(&seen); err != nil || seen {
		return err
	}
	if _, err := tx.ExecContext(ctx, w.remember, "orders", id); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, w.handler, worker); err != nil {
		return err
	}
	return tx.Commit()
}
