package pgxstore_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	"go.uber.org/goleak"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/testserver"
	"github.com/watermill-inbox/inbox/internal/txctx"
	"github.com/watermill-inbox/inbox/internal/wireproxy"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var modes = []pgx.QueryExecMode{
	pgx.QueryExecModeCacheStatement, pgx.QueryExecModeCacheDescribe, pgx.QueryExecModeDescribeExec, pgx.QueryExecModeExec,
	pgx.QueryExecModeSimpleProtocol,
}

// forEachMode runs a test in every exec mode of pgx.
func forEachMode(t *testing.T, test func(t *testing.T, mode pgx.QueryExecMode)) {
	t.Helper()
	for _, mode := range modes {
		t.Run(mode.String(), func(t *testing.T) {
			t.Parallel()
			test(t, mode)
		})
	}
}

func newPool(tb testing.TB, dsn string, mode pgx.QueryExecMode, maxConns int32) *pgxpool.Pool {
	tb.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		tb.Fatal(err)
	}
	config.ConnConfig.DefaultQueryExecMode = mode
	config.MaxConns = maxConns
	pool, err := pgxpool.NewWithConfig(tb.Context(), config)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		// The pool closes broken connections in the background.
		for deadline := time.Now().Add(10 * time.Second); pool.Stat().AcquiredConns() != 0; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				tb.Errorf("%d connections are still in use", pool.Stat().AcquiredConns())
				break
			}
		}
		pool.Close()
	})
	return pool
}

var tables atomic.Int64

// newStore returns a store on a table of its own, next to a table for effects with a column id.
func newStore(tb testing.TB, mode pgx.QueryExecMode) (store *pgxstore.Store, pool *pgxpool.Pool, table string) {
	tb.Helper()
	pool = newPool(tb, testenv.PostgreSQL(tb), mode, 10)
	store, table = newStoreOn(tb, pool)
	return store, pool, table
}

func newStoreOn(tb testing.TB, pool *pgxpool.Pool) (store *pgxstore.Store, table string) {
	tb.Helper()
	table = fmt.Sprintf("inbox_pgx_%d_%d_%d", os.Getpid(), time.Now().UnixNano()%1e9, tables.Add(1))
	tb.Cleanup(func() {
		if _, err := pool.Exec(context.Background(), "DROP TABLE IF EXISTS "+table+", "+effects(table)); err != nil {
			tb.Error(err)
		}
	})
	store = storeOn(tb, pool, table)
	if err := store.InitializeSchema(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	exec(tb, pool, "CREATE TABLE "+effects(table)+" (id INTEGER PRIMARY KEY)")
	return store, table
}

// started skips the test if the server is not installed, and removes it after the test.
func started(tb testing.TB, name string) func(*testserver.Server, error) *testserver.Server {
	tb.Helper()
	return func(server *testserver.Server, err error) *testserver.Server {
		tb.Helper()
		if testserver.IsMissing(err) {
			testenv.Missing(tb, name, err.Error())
		}
		if err != nil {
			tb.Fatal(err)
		}
		tb.Cleanup(server.Remove)
		return server
	}
}

func effects(table string) string { return table + "_effects" }

func storeOn(tb testing.TB, pool *pgxpool.Pool, table string) *pgxstore.Store {
	tb.Helper()
	store, err := pgxstore.New(pool, pgxstore.Config{Table: table})
	if err != nil {
		tb.Fatal(err)
	}
	return store
}

func claimOf(id string) inbox.Claim {
	return inbox.Claim{Key: inbox.Key{Consumer: "orders", MessageID: id}, LockTimeout: 10 * time.Second}
}

func begin(tb testing.TB, store inbox.Store, id string) (inbox.Tx, pgx.Tx) {
	tb.Helper()
	tx, err := store.Begin(tb.Context(), claimOf(id))
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = tx.Rollback(context.Background()) })
	if tx.Recorded() != nil {
		tb.Fatalf("%s is recorded already", id)
	}
	return tx, tx.Native().(pgx.Tx)
}

func process(tb testing.TB, store inbox.Store, id string, outputs ...*message.Message) {
	tb.Helper()
	tx, native := begin(tb, store, id)
	if _, err := native.Exec(tb.Context(), "SELECT 1"); err != nil {
		tb.Fatal(err)
	}
	if err := tx.Commit(tb.Context(), outputs); err != nil {
		tb.Fatal(err)
	}
}

func recorded(tb testing.TB, store inbox.Store, id string) *inbox.Record {
	tb.Helper()
	tx, err := store.Begin(tb.Context(), claimOf(id))
	if err != nil {
		tb.Fatal(err)
	}
	if err := tx.Rollback(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	if tx.Recorded() == nil {
		tb.Fatalf("%s is not recorded", id)
	}
	return tx.Recorded()
}

func wantUnclaimed(tb testing.TB, store inbox.Store, id string) {
	tb.Helper()
	tx, _ := begin(tb, store, id)
	if err := tx.Rollback(tb.Context()); err != nil {
		tb.Fatal(err)
	}
}

func count(tb testing.TB, pool *pgxpool.Pool, table string) (n int) {
	tb.Helper()
	if err := pool.QueryRow(tb.Context(), "SELECT count(*) FROM "+table).Scan(&n); err != nil {
		tb.Fatal(err)
	}
	return n
}

func exec(tb testing.TB, db interface {
	pgxstore.Executor
}, sql string, args ...any,
) {
	tb.Helper()
	if _, err := db.Exec(tb.Context(), sql, args...); err != nil {
		tb.Fatalf("%s: %v", sql, err)
	}
}

func wantError(tb testing.TB, err error, texts ...string) {
	tb.Helper()
	if err == nil {
		tb.Fatal("no error")
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			tb.Errorf("error %q does not say %q", err, text)
		}
	}
}

func output() *message.Message { return message.NewMessage("output", []byte("payload")) }

func TestRoundTrips(t *testing.T) {
	t.Parallel()
	forEachMode(t, func(t *testing.T, mode pgx.QueryExecMode) {
		if mode == pgx.QueryExecModeDescribeExec {
			t.Skip("describes every statement anew, at a round trip each")
		}
		_, _, table := newStore(t, mode)
		proxy, dsn := wireproxy.Through(t, testenv.PostgreSQL(t))
		store := storeOn(t, newPool(t, dsn, mode, 1), table)
		process(t, store, "warm")
		recorded(t, store, "warm")
		process(t, store, "warm with outputs", output())
		for _, delivery := range []struct {
			name string
			run  func()
			want int
		}{
			{"first", func() { process(t, store, "measured") }, 3},
			{"duplicate", func() { recorded(t, store, "measured") }, 2},
			{"first with outputs", func() { process(t, store, "measured with outputs", output()) }, 3},
		} {
			proxy.Reset()
			delivery.run()
			if got := proxy.Snapshot(); got.RoundTrips != delivery.want {
				t.Errorf("%s: %d round trips, want %d:\n%s", delivery.name, got.RoundTrips, delivery.want, got)
			}
		}
	})
}

func TestEffectsAreCommittedWithTheClaim(t *testing.T) {
	t.Parallel()
	forEachMode(t, func(t *testing.T, mode pgx.QueryExecMode) {
		store, pool, table := newStore(t, mode)
		for i, outputs := range [][]*message.Message{nil, {output()}} {
			id := fmt.Sprint(i)
			tx, native := begin(t, store, id)
			exec(t, native, "INSERT INTO "+effects(table)+" VALUES ($1)", i)
			if err := tx.Rollback(t.Context()); err != nil {
				t.Fatal(err)
			}
			tx, native = begin(t, store, id)
			exec(t, native, "INSERT INTO "+effects(table)+" VALUES ($1)", i)
			if err := tx.Commit(t.Context(), outputs); err != nil {
				t.Fatal(err)
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Errorf("rollback after the commit: %v", err)
			}
			if got := recorded(t, store, id); len(got.Outputs) != len(outputs) {
				t.Errorf("%d outputs recorded", len(got.Outputs))
			}
		}
		if got := count(t, pool, effects(table)); got != 2 {
			t.Errorf("%d effects", got)
		}
	})
}

// TestCommitIsNeverAWrongSuccess has handlers do what makes a COMMIT something else than it looks like.
func TestCommitIsNeverAWrongSuccess(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name    string
		handler func(t *testing.T, tx pgx.Tx, table string)
		want    string
	}{
		{"hidden error", func(t *testing.T, tx pgx.Tx, _ string) {
			t.Helper()
			_, err := tx.Exec(t.Context(), "SELECT 1/0")
			wantError(t, err, "division")
		}, "swallowed"},
		{"raw ROLLBACK", func(t *testing.T, tx pgx.Tx, _ string) {
			t.Helper()
			exec(t, tx, "ROLLBACK")
		}, "does not own its claim"},
		{"raw ROLLBACK and BEGIN, then outputs", func(t *testing.T, tx pgx.Tx, _ string) {
			t.Helper()
			exec(t, tx, "ROLLBACK")
			exec(t, tx, "BEGIN")
		}, "does not own its claim"},
		{"deleted claim, then outputs", func(t *testing.T, tx pgx.Tx, table string) {
			t.Helper()
			exec(t, tx, "DELETE FROM "+table)
		}, "does not own its claim"},
		{"rows left open", func(t *testing.T, tx pgx.Tx, _ string) {
			t.Helper()
			rows, err := tx.Query(t.Context(), "SELECT generate_series(1, 100000)")
			if err != nil || !rows.Next() {
				t.Fatal(err)
			}
		}, "rows open"},
		{"interrupted query", func(t *testing.T, tx pgx.Tx, _ string) {
			t.Helper()
			ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
			defer cancel()
			_, err := tx.Exec(ctx, "SELECT pg_sleep(60)")
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Fatal(err)
			}
		}, "connection is lost"},
		{"killed connection", func(t *testing.T, tx pgx.Tx, _ string) {
			t.Helper()
			_, _ = tx.Exec(t.Context(), "SELECT pg_terminate_backend(pg_backend_pid())")
		}, "inbox: commit: "},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			forEachMode(t, func(t *testing.T, mode pgx.QueryExecMode) {
				store, pool, table := newStore(t, mode)
				outputs := [][]*message.Message{{output()}, nil}
				if strings.Contains(tt.name, "then outputs") {
					outputs = outputs[:1] // without, the COMMIT goes alone, and nothing asks
				}
				for _, outputs := range outputs {
					tx, native := begin(t, store, "id")
					exec(t, native, "INSERT INTO "+effects(table)+" VALUES (1)")
					tt.handler(t, native, table)
					wantError(t, tx.Commit(t.Context(), outputs), "inbox: commit: ", tt.want)
					if err := tx.Rollback(t.Context()); err != nil {
						t.Errorf("rollback: %v", err)
					}
					lost := tt.name == "interrupted query" || tt.name == "killed connection"
					if got := tx.(inbox.LossDetector).ConnectionLost(); got != lost {
						t.Errorf("connection lost: %t", got)
					}
					wantUnclaimed(t, store, "id")
					if got := count(t, pool, effects(table)); got != 0 {
						t.Errorf("%d effects", got)
					}
				}
			})
		})
	}
}

func TestLongTransactionsAreSealedAtTheirEnd(t *testing.T) {
	t.Parallel()
	store, pool, table := newStore(t, pgx.QueryExecModeCacheStatement)
	tx, native := begin(t, store, "id")
	exec(t, native, "SELECT pg_sleep(0.3)")
	if err := tx.Commit(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	var late bool
	if err := pool.QueryRow(t.Context(), "SELECT processed_at - received_at >= interval '300 milliseconds' FROM "+table).Scan(&late); err != nil {
		t.Fatal(err)
	}
	if !late {
		t.Error("processed_at is the time of the claim")
	}
}

func TestWaitForAnotherClaimIsBoundedForTheClaimAlone(t *testing.T) {
	t.Parallel()
	forEachMode(t, func(t *testing.T, mode pgx.QueryExecMode) {
		store, pool, table := newStore(t, mode)
		tx, native := begin(t, store, "id")
		var own string
		if err := native.QueryRow(t.Context(), "SHOW lock_timeout").Scan(&own); err != nil || own != "0" {
			t.Errorf("the handler's lock_timeout is %q, %v", own, err)
		}
		claim := claimOf("id")
		claim.LockTimeout = 50 * time.Millisecond
		if _, err := store.Begin(t.Context(), claim); !errors.Is(err, inbox.ErrInFlight) || store.IsTransient(err) {
			t.Errorf("error %v", err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := store.Begin(ctx, claimOf("id")); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("error %v", err)
		}
		process(t, store, "other")

		ended := make(chan error)
		go func() {
			second, err := store.Begin(context.Background(), claimOf("id"))
			if err == nil && second.Recorded() == nil {
				err = errors.New("claimed twice")
			}
			ended <- err
		}()
		waitForLock(t, pool, table)
		if err := tx.Commit(t.Context(), nil); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
}

// waitForLock waits until a session waits for a lock on the table.
func waitForLock(t *testing.T, pool *pgxpool.Pool, table string) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); ; time.Sleep(5 * time.Millisecond) {
		var waiting bool
		err := pool.QueryRow(t.Context(), "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND query LIKE '%' || $1 || '%'",
			table).Scan(&waiting)
		if err != nil {
			t.Fatal(err)
		}
		if waiting {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("nobody waits")
		}
	}
}

func TestConcurrentClaimsInEveryIsolationLevel(t *testing.T) {
	t.Parallel()
	for _, level := range []pgx.TxIsoLevel{pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable} {
		t.Run(string(level), func(t *testing.T) {
			t.Parallel()
			_, pool, table := newStore(t, pgx.QueryExecModeCacheStatement)
			store, err := pgxstore.New(pool, pgxstore.Config{Table: table, TxOptions: pgx.TxOptions{IsoLevel: level}})
			if err != nil {
				t.Fatal(err)
			}
			var wg sync.WaitGroup
			for worker := range 4 { // as if each were a process
				dedup, err := inbox.NewDeduplicator(inbox.Config{Store: store, Consumer: "orders", TransientRetries: 20})
				if err != nil {
					t.Fatal(err)
				}
				wg.Go(func() {
					for id := range 25 {
						err := dedup.Process(t.Context(), inbox.Key{MessageID: fmt.Sprint(id)}, func(ctx context.Context) error {
							_, err := store.Executor(ctx).Exec(ctx, "INSERT INTO "+effects(table)+" VALUES ($1)", id)
							return err
						})
						if err != nil && !errors.Is(err, inbox.ErrDuplicate) {
							t.Errorf("worker %d: %v", worker, err)
						}
					}
				})
			}
			wg.Wait()
			if got := count(t, pool, effects(table)); got != 25 {
				t.Errorf("%d effects", got)
			}
		})
	}
}

func TestHandlersTransaction(t *testing.T) {
	t.Parallel()
	forEachMode(t, func(t *testing.T, mode pgx.QueryExecMode) {
		store, pool, table := newStore(t, mode)
		tx, native := begin(t, store, "id")
		ctx := t.Context()

		wantError(t, native.Commit(ctx), "belongs to the inbox")
		wantError(t, native.Rollback(ctx), "belongs to the inbox")
		savepoint, err := native.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		exec(t, savepoint, "INSERT INTO "+effects(table)+" VALUES (1)")
		nested, err := savepoint.Begin(ctx)
		if err != nil {
			t.Fatal(err)
		}
		exec(t, nested, "INSERT INTO "+effects(table)+" VALUES (2)")
		if err := nested.Rollback(ctx); err != nil {
			t.Error(err)
		}
		if err := savepoint.Commit(ctx); err != nil {
			t.Error(err)
		}
		if n, err := native.CopyFrom(ctx, pgx.Identifier{effects(table)}, []string{"id"}, pgx.CopyFromRows([][]any{{int32(3)}})); n != 1 || err != nil {
			t.Errorf("CopyFrom: %d, %v", n, err)
		}
		large := native.LargeObjects()
		if _, err := large.Create(ctx, 0); err != nil {
			t.Error(err)
		}
		batch := &pgx.Batch{}
		batch.Queue("INSERT INTO " + effects(table) + " VALUES (4)")
		if err := native.SendBatch(ctx, batch).Close(); err != nil {
			t.Error(err)
		}
		if err := tx.Commit(ctx, []*message.Message{output()}); err != nil {
			t.Fatal(err)
		}
		if got := count(t, pool, effects(table)); got != 3 {
			t.Errorf("%d effects", got)
		}

		for _, tx := range []pgx.Tx{native, savepoint} {
			_, beginErr := tx.Begin(ctx)
			_, copyErr := tx.CopyFrom(ctx, pgx.Identifier{"x"}, nil, pgx.CopyFromRows(nil))
			_, prepareErr := tx.Prepare(ctx, "x", "SELECT 1")
			_, execErr := tx.Exec(ctx, "SELECT 1")
			rows, queryErr := tx.Query(ctx, "SELECT 1")
			rows.Close()
			for name, err := range map[string]error{
				"Begin": beginErr, "Commit": tx.Commit(ctx), "Rollback": tx.Rollback(ctx), "CopyFrom": copyErr, "Prepare": prepareErr,
				"Exec": execErr, "Query": queryErr, "rows": rows.Err(), "QueryRow": tx.QueryRow(ctx, "SELECT 1").Scan(),
				"SendBatch": tx.SendBatch(ctx, &pgx.Batch{}).Close(),
			} {
				if !errors.Is(err, pgx.ErrTxClosed) {
					t.Errorf("%s after the end: %v", name, err)
				}
			}
			if tx.Conn() != nil {
				t.Error("Conn after the end")
			}
		}
	})
}

// TestGoroutineLeftBehindNeverReachesAnotherMessage has a handler's goroutine go on with the transaction for ever.
func TestGoroutineLeftBehindNeverReachesAnotherMessage(t *testing.T) {
	t.Parallel()
	store, pool, table := newStore(t, pgx.QueryExecModeCacheStatement)
	var wg sync.WaitGroup
	for i := range 50 {
		tx, native := begin(t, store, fmt.Sprint(i))
		started := make(chan struct{})
		wg.Go(func() {
			for n := 0; ; n++ {
				if _, err := native.Exec(context.Background(), "SELECT 1"); errors.Is(err, pgx.ErrTxClosed) {
					return
				}
				if n == 0 {
					close(started)
				}
			}
		})
		<-started
		if err := tx.Commit(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
	}
	wg.Wait()
	if got := count(t, pool, table); got != 50 {
		t.Errorf("%d records", got)
	}
}

func TestRunningQueryOfALeftGoroutineIsCutWhenTheCommitTimesOut(t *testing.T) {
	t.Parallel()
	store, pool, table := newStore(t, pgx.QueryExecModeCacheStatement)
	tx, native := begin(t, store, "id")
	blocker, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = blocker.Rollback(t.Context()) }()
	exec(t, blocker, "LOCK TABLE "+effects(table))
	ended := make(chan error)
	go func() {
		_, err := native.Exec(context.Background(), "LOCK TABLE "+effects(table))
		ended <- err
	}()
	waitForLock(t, pool, table)
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	wantError(t, tx.Commit(ctx, nil), "inbox: commit: ")
	if err := <-ended; err == nil {
		t.Error("the query went on")
	}
	wantUnclaimed(t, store, "id")
}

func TestExecutorIsThisStoresTransactionOrThePool(t *testing.T) {
	t.Parallel()
	store, pool, _ := newStore(t, pgx.QueryExecModeCacheStatement)
	other, _, _ := newStore(t, pgx.QueryExecModeCacheStatement)
	if store.Executor(t.Context()) != pgxstore.Executor(pool) {
		t.Error("not the pool")
	}
	_, native := begin(t, store, "id")
	ctx := txctx.With(t.Context(), &txctx.Frame{Native: native})
	if store.Executor(ctx) != native.(pgxstore.Executor) {
		t.Error("not the transaction")
	}
	if other.Executor(ctx) == native.(pgxstore.Executor) {
		t.Error("another store's transaction")
	}
	_, inner := begin(t, other, "id")
	if store.Executor(txctx.With(ctx, &txctx.Frame{Native: inner})) != native.(pgxstore.Executor) {
		t.Error("not the outer transaction")
	}
}

func TestASessionThatTheHandlerLeftChangedIsExplained(t *testing.T) {
	t.Parallel()
	store, _, _ := newStore(t, pgx.QueryExecModeCacheStatement)
	for _, change := range []string{"SET LOCAL search_path = pg_catalog", "SET LOCAL ROLE pg_monitor"} {
		tx, native := begin(t, store, "id")
		if _, err := native.Exec(t.Context(), change); err != nil {
			t.Fatal(err)
		}
		output := []*message.Message{message.NewMessage("output", nil)}
		wantError(t, tx.Commit(t.Context(), output), "inbox: commit: ", "the handler left ", "search_path")
		wantUnclaimed(t, store, "id")
	}
}

func TestExhaustedPoolIsExplained(t *testing.T) {
	t.Parallel()
	_, _, table := newStore(t, pgx.QueryExecModeCacheStatement)
	store := storeOn(t, newPool(t, testenv.PostgreSQL(t), pgx.QueryExecModeCacheStatement, 1), table)
	_, _ = begin(t, store, "id")
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := store.Begin(ctx, claimOf("other"))
	wantError(t, err, "inbox: begin transaction: ", "no connection became free")
	if !errors.Is(err, context.DeadlineExceeded) {
		t.Error(err)
	}
}

func TestLostIdleConnectionsAreReplaced(t *testing.T) {
	t.Parallel()
	store, pool, table := newStore(t, pgx.QueryExecModeCacheStatement)
	own := storeOn(t, newPool(t, testenv.PostgreSQL(t)+"&application_name="+table, pgx.QueryExecModeCacheStatement, 3), table)
	process(t, own, "warm")
	exec(t, pool, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE application_name = $1", table)
	process(t, own, "id")
	recorded(t, store, "id")
}

func TestColdPaths(t *testing.T) {
	t.Parallel()
	forEachMode(t, func(t *testing.T, mode pgx.QueryExecMode) {
		store, pool, table := newStore(t, mode)
		ctx := t.Context()
		if err := store.CheckSchema(ctx); err != nil {
			t.Error(err)
		}
		process(t, store, "stranded", output())
		if n, err := store.CountStranded(ctx, 0); n != 1 || err != nil {
			t.Errorf("%d stranded, %v", n, err)
		}
		if err := store.MarkOutputsPublished(ctx, []inbox.Key{{Consumer: "orders", MessageID: "stranded"}}); err != nil {
			t.Error(err)
		}
		if got := recorded(t, store, "stranded"); len(got.Outputs) != 0 {
			t.Error("outputs left")
		}
		if _, found, err := store.OldestAge(ctx); !found || err != nil {
			t.Errorf("oldest: %t, %v", found, err)
		}
		if err := store.Forget(ctx, inbox.Key{Consumer: "orders", MessageID: "stranded"}); err != nil {
			t.Error(err)
		}
		if got := count(t, pool, table); got != 0 {
			t.Errorf("%d records", got)
		}
		if n, err := store.DeleteExpired(ctx, time.Hour, 10); n != 0 || err != nil {
			t.Errorf("%d deleted, %v", n, err)
		}
	})
}

// hideClaims makes claims find a row in their way that is not there afterwards, as one whose transaction rolls back between
// the claim and the look at it: all of them but each nth.
func hideClaims(t *testing.T, pool *pgxpool.Pool, table string, n int) {
	t.Helper()
	exec(t, pool, "CREATE SEQUENCE "+table+"_claims OWNED BY "+table+".consumer")
	exec(t, pool, fmt.Sprintf(`CREATE FUNCTION %[1]s_hide() RETURNS trigger LANGUAGE plpgsql AS
		'BEGIN IF nextval(''%[1]s_claims'') %% %[2]d = 0 THEN RETURN NEW; END IF; RETURN NULL; END'`, table, n))
	exec(t, pool, fmt.Sprintf("CREATE TRIGGER hide BEFORE INSERT ON %[1]s FOR EACH ROW EXECUTE FUNCTION %[1]s_hide()", table))
	t.Cleanup(func() {
		if _, err := pool.Exec(context.Background(), "DROP FUNCTION "+table+"_hide CASCADE"); err != nil {
			t.Error(err)
		}
	})
}

func TestRowThatIsGoneAgainIsNoDuplicate(t *testing.T) {
	t.Parallel()
	forEachMode(t, func(t *testing.T, mode pgx.QueryExecMode) {
		store, pool, table := newStore(t, mode)
		hideClaims(t, pool, table, 3)
		process(t, store, "id")
		recorded(t, store, "id")
	})
}

func TestRowThatIsGoneAgainAndAgainIsAnError(t *testing.T) {
	t.Parallel()
	store, pool, table := newStore(t, pgx.QueryExecModeCacheStatement)
	hideClaims(t, pool, table, 1000)
	_, err := store.Begin(t.Context(), claimOf("id"))
	wantError(t, err, "inbox: claim key: ", "neither be claimed nor be found")
}

func TestMissingTableIsExplained(t *testing.T) {
	t.Parallel()
	pool := newPool(t, testenv.PostgreSQL(t), pgx.QueryExecModeCacheStatement, 1)
	_, err := storeOn(t, pool, "no_such_table").Begin(t.Context(), claimOf("id"))
	wantError(t, err, "inbox: claim key: ", "InitializeSchema")
}

func TestClosedPoolIsAnError(t *testing.T) {
	t.Parallel()
	pool := newPool(t, testenv.PostgreSQL(t), pgx.QueryExecModeCacheStatement, 1)
	pool.Close()
	_, err := storeOn(t, pool, "inbox").Begin(t.Context(), claimOf("id"))
	wantError(t, err, "inbox: begin transaction: ")
}

func TestReadOnlyDatabaseIsAnError(t *testing.T) {
	t.Parallel()
	_, _, table := newStore(t, pgx.QueryExecModeCacheStatement)
	dsn := testenv.PostgreSQL(t) + "&default_transaction_read_only=on"
	store := storeOn(t, newPool(t, dsn, pgx.QueryExecModeCacheStatement, 1), table)
	_, err := store.Begin(t.Context(), claimOf("id"))
	wantError(t, err, "inbox: claim key: ", "25006")
}

func TestConfigFaultsAreNamed(t *testing.T) {
	t.Parallel()
	if _, err := pgxstore.New(nil, pgxstore.Config{}); err == nil {
		t.Error("no pool, no error")
	}
	for field, config := range map[string]pgxstore.Config{
		"Table":      {Table: `x"; DROP TABLE y; --`},
		"IsoLevel":   {TxOptions: pgx.TxOptions{IsoLevel: "snapshot"}},
		"AccessMode": {TxOptions: pgx.TxOptions{AccessMode: pgx.ReadOnly}},
		"TxOptions":  {TxOptions: pgx.TxOptions{CommitQuery: "commit and chain"}},
	} {
		if err := config.Validate(); err == nil || !strings.Contains(err.Error(), field) {
			t.Errorf("%v does not name %s", err, field)
		}
	}
}
