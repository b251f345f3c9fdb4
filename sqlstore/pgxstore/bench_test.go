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
	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/testserver"
)

// benchRound is how many messages a worker processes one way before it is the next way's turn.
const benchRound = 25

// BenchmarkDelivery processes messages in several ways by turns, since only what ran side by side can be compared on a
// machine with neighbours. The handler is one UPDATE, of a row for each worker. An iteration is a round of each way:
//
//   - bare: the handler in a transaction of the pool, without deduplication
//   - inbox: this package; inbox-1KB: with a handler that returns a message of 1 KB
//   - least: BEGIN and an insert of the ID in one round trip, the handler, COMMIT: without it, nothing is deduplicated
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
				{"inbox", w.inbox(b, "orders", nil)},
				{"inbox-1KB", w.inbox(b, "orders-1KB", make([]byte, 1024))},
				{"least", w.least},
				{"insert-or-skip", w.insertOrSkip},
				{"select-first", w.selectFirst},
				{"duplicate", w.inbox(b, "orders", nil)},
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
				{"inbox", "bare"},
				{"least", "bare"},
				{"inbox", "least"},
				{"inbox", "insert-or-skip"},
				{"inbox", "select-first"},
				{"inbox-1KB", "inbox"},
				{"duplicate", "duplicate-select-first"},
			} {
				b.ReportMetric(elapsed[pair[1]].Seconds()/elapsed[pair[0]].Seconds(), pair[0]+"/"+pair[1])
			}
			b.ReportMetric(0, "ns/op") // a sum of different things
		})
	}
}

// ways are the ways to process a message.
type ways struct {
	workers int
	store   inbox.Store
	pool    *pgxpool.Pool
	db      *sql.DB

	update, find, insert, insertLeast string
}

func newWays(b *testing.B, workers int) *ways {
	b.Helper()
	pool := newPool(b, syncingPostgreSQL(b), pgx.QueryExecModeCacheStatement, int32(workers)) //nolint:gosec // few
	store, table := newStoreOn(b, pool)
	w := &ways{
		workers: workers,
		store:   struct{ inbox.Store }{store}, // which cannot mark outputs as published, while it is another way's turn
		pool:    pool,
		db:      stdlib.OpenDBFromPool(pool),
		update:  "UPDATE " + table + "_stock SET quantity = quantity + 1 WHERE worker = $1",
		find:    "SELECT EXISTS (SELECT FROM " + table + "_by_hand WHERE consumer = $1 AND message_id = $2)",
		insert:  "INSERT INTO " + table + "_by_hand VALUES ($1, $2, now()) ON CONFLICT DO NOTHING",

		insertLeast: "INSERT INTO " + table + "_least VALUES ($1)",
	}
	b.Cleanup(func() {
		_ = w.db.Close()
		if _, err := pool.Exec(context.Background(), "DROP TABLE IF EXISTS "+table+"_stock, "+table+"_by_hand, "+table+"_least"); err != nil {
			b.Error(err)
		}
	})
	exec(b, pool, "CREATE TABLE "+table+"_stock (worker INTEGER PRIMARY KEY, quantity BIGINT NOT NULL)")
	exec(b, pool, "INSERT INTO "+table+"_stock SELECT generate_series(0, $1), 0", workers-1)
	exec(b, pool, "CREATE TABLE "+table+"_by_hand (consumer TEXT, message_id TEXT, received_at TIMESTAMPTZ NOT NULL, "+
		"PRIMARY KEY (consumer, message_id))")
	exec(b, pool, "CREATE INDEX ON "+table+"_by_hand (received_at)")
	exec(b, pool, "CREATE TABLE "+table+"_least (message_id TEXT PRIMARY KEY)")
	return w
}

// syncingPostgreSQL returns the URL of a server that flushes its log: the tests' server, or else one of its own.
func syncingPostgreSQL(b *testing.B) string {
	b.Helper()
	dsn := testenv.PostgreSQL(b)
	conn, err := pgx.Connect(b.Context(), dsn)
	if err != nil {
		b.Fatal(err)
	}
	defer func() { _ = conn.Close(b.Context()) }()
	var fsync bool
	if err := conn.QueryRow(b.Context(), "SELECT current_setting('fsync')::boolean").Scan(&fsync); err != nil {
		b.Fatal(err)
	}
	if fsync {
		return dsn
	}
	return started(b, "postgres")(testserver.PostgreSQL("fsync=on")).DSN
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
		_, err := tx.Exec(ctx, w.update, worker)
		return err
	})
}

func (w *ways) inbox(b *testing.B, consumer string, output []byte) func(ctx context.Context, worker int, id string) error {
	b.Helper()
	dedup, err := inbox.NewDeduplicator(inbox.Config{Store: w.store, Consumer: consumer})
	if err != nil {
		b.Fatal(err)
	}
	return func(ctx context.Context, worker int, id string) error {
		msg := message.NewMessageWithContext(ctx, id, nil)
		_, err := dedup.Middleware(func(msg *message.Message) ([]*message.Message, error) {
			tx, _ := inbox.TxFromContext[pgx.Tx](msg.Context())
			if _, err := tx.Exec(msg.Context(), w.update, worker); err != nil || output == nil {
				return nil, err
			}
			return []*message.Message{message.NewMessage(id, output)}, nil
		})(msg)
		return err
	}
}

// least knows no duplicates, no bounded wait, no retention: what any inbox comes to that inserts.
func (w *ways) least(ctx context.Context, worker int, id string) error {
	conn, err := w.pool.Acquire(ctx)
	if err != nil {
		return err
	}
	defer conn.Release()
	batch := &pgx.Batch{}
	batch.BeginTx(pgx.TxOptions{})
	batch.Queue(w.insertLeast, id)
	results := conn.SendBatch(ctx, batch)
	tx := results.Tx()
	if err := results.Close(); err != nil {
		return err
	}
	if _, err := tx.Exec(ctx, w.update, worker); err != nil {
		return err
	}
	return tx.Commit(ctx)
}

// insertOrSkip is what is right to write by hand.
func (w *ways) insertOrSkip(ctx context.Context, worker int, id string) error {
	return pgx.BeginFunc(ctx, w.pool, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, w.insert, "insert-or-skip", id)
		if err != nil || tag.RowsAffected() == 0 {
			return err
		}
		_, err = tx.Exec(ctx, w.update, worker)
		return err
	})
}

// selectFirst is what people write: of two deliveries at once, both may find nothing.
func (w *ways) selectFirst(ctx context.Context, worker int, id string) error {
	tx, err := w.db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	var found bool
	if err := tx.QueryRowContext(ctx, w.find, "select-first", id).Scan(&found); err != nil || found {
		return err
	}
	if _, err := tx.ExecContext(ctx, w.insert, "select-first", id); err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, w.update, worker); err != nil {
		return err
	}
	return tx.Commit()
}
