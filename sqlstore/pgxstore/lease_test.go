package pgxstore_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
)

func TestWhatIsReadFromTheTransactionEndsWithIt(t *testing.T) {
	t.Parallel()
	forEachMode(t, func(t *testing.T, mode pgx.QueryExecMode) {
		store, _, _ := newStore(t, mode)
		const many = "SELECT generate_series(1, 100000)"
		batchOf := func(tx pgx.Tx) pgx.BatchResults {
			batch := &pgx.Batch{}
			batch.Queue(many)
			batch.Queue(many)
			return tx.SendBatch(t.Context(), batch)
		}
		for name, leave := range map[string]func(tx pgx.Tx) (use func() error){
			"rows": func(tx pgx.Tx) func() error {
				rows, err := tx.Query(t.Context(), many)
				if err != nil || !rows.Next() {
					t.Fatal(err)
				}
				return func() error {
					defer rows.Close()
					if rows.Next() || rows.Conn() != nil || rows.TypeMap() != nil || rows.FieldDescriptions() != nil ||
						rows.RawValues() != nil || rows.CommandTag().String() != "" {
						t.Error("the rows are open")
					}
					_, err := rows.Values()
					return errors.Join(err, rows.Scan(), rows.Err())
				}
			},
			"row": func(tx pgx.Tx) func() error {
				row := tx.QueryRow(t.Context(), many)
				return func() error { return row.Scan(new(int)) }
			},
			"batch": func(tx pgx.Tx) func() error {
				results := batchOf(tx)
				return func() error {
					_, execErr := results.Exec()
					rows, queryErr := results.Query()
					rows.Close()
					return errors.Join(execErr, queryErr, results.QueryRow().Scan(), results.Close())
				}
			},
			"rows of a batch": func(tx pgx.Tx) func() error {
				rows, err := batchOf(tx).Query()
				if err != nil || !rows.Next() {
					t.Fatal(err)
				}
				return func() error {
					rows.Close()
					return rows.Err()
				}
			},
			"row of a batch": func(tx pgx.Tx) func() error {
				row := batchOf(tx).QueryRow()
				return func() error { return row.Scan(new(int)) }
			},
		} {
			tx, native := begin(t, store, "id")
			use := leave(native)
			wantError(t, tx.Commit(t.Context(), nil), "inbox: commit: ", "rows open")
			err := use()
			if !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("%s: %v", name, err)
			}
			if joined, ok := err.(interface{ Unwrap() []error }); ok {
				for _, err := range joined.Unwrap() {
					if !errors.Is(err, pgx.ErrTxClosed) {
						t.Errorf("%s: %v", name, err)
					}
				}
			}
			wantUnclaimed(t, store, "id")
		}
	})
}

// TestGoroutineLeftReadingNeverReachesAnotherMessage is about the race detector as much as about the outcome.
func TestGoroutineLeftReadingNeverReachesAnotherMessage(t *testing.T) {
	t.Parallel()
	store, _, _ := newStore(t, pgx.QueryExecModeCacheStatement)
	for range 20 {
		tx, native := begin(t, store, "id")
		rows, err := native.Query(t.Context(), "SELECT generate_series(1, 10000000)")
		if err != nil {
			t.Fatal(err)
		}
		reading, ended := make(chan struct{}), make(chan error)
		go func() {
			rows.Next()
			close(reading)
			for rows.Next() {
				_, _ = rows.Values()
			}
			ended <- rows.Err()
		}()
		<-reading
		wantError(t, tx.Commit(t.Context(), nil), "inbox: commit: ", "rows open")
		if err := <-ended; !errors.Is(err, pgx.ErrTxClosed) {
			t.Errorf("the rows ended in %v", err)
		}
	}
	wantUnclaimed(t, store, "id")
}

// stuckSource is a source whose first row never comes.
type stuckSource struct{ asked, ended chan struct{} }

func (s stuckSource) Next() bool {
	close(s.asked)
	<-s.ended
	return false
}

func (stuckSource) Values() ([]any, error) { return nil, nil }
func (stuckSource) Err() error             { return nil }

func TestCallThatNeverReturnsHoldsNothingUp(t *testing.T) {
	t.Parallel()
	for name, finish := range map[string]func(ctx context.Context, tx inbox.Tx){
		"Commit": func(ctx context.Context, tx inbox.Tx) {
			err := tx.Commit(ctx, nil)
			wantError(t, err, "inbox: commit: ", "uses the transaction still")
			if !errors.Is(err, context.DeadlineExceeded) {
				t.Error(err)
			}
		},
		"Rollback": func(ctx context.Context, tx inbox.Tx) {
			if err := tx.Rollback(ctx); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			_, _, table := newStore(t, pgx.QueryExecModeCacheStatement)
			store := storeOn(t, newPool(t, testenv.PostgreSQL(t), pgx.QueryExecModeCacheStatement, 1), table)
			tx, native := begin(t, store, "id")
			source := stuckSource{asked: make(chan struct{}), ended: make(chan struct{})}
			copied := make(chan error)
			go func() {
				_, err := native.CopyFrom(context.Background(), pgx.Identifier{effects(table)}, []string{"id"}, source)
				copied <- err
			}()
			<-source.asked

			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			defer cancel()
			finish(ctx, tx)
			if !tx.(inbox.LossDetector).ConnectionLost() {
				t.Error("the connection is not lost")
			}
			if err := tx.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
			wantUnclaimed(t, store, "id") // on the pool's only connection
			close(source.ended)
			if err := <-copied; err == nil {
				t.Error("the copy succeeded")
			}
		})
	}
}

func TestLargeObjectsEndWithTheTransaction(t *testing.T) {
	t.Parallel()
	for name, finish := range map[string]func(t *testing.T, tx inbox.Tx, native pgx.Tx){
		"Commit":              func(t *testing.T, tx inbox.Tx, _ pgx.Tx) { t.Helper(); commit(t, tx) },
		"Commit with outputs": func(t *testing.T, tx inbox.Tx, _ pgx.Tx) { t.Helper(); commit(t, tx, output()) },
		"Commit after a raw ROLLBACK": func(t *testing.T, tx inbox.Tx, native pgx.Tx) {
			t.Helper()
			exec(t, native, "ROLLBACK")
			wantError(t, tx.Commit(t.Context(), nil), "does not own its claim")
		},
		"Rollback": func(t *testing.T, tx inbox.Tx, _ pgx.Tx) {
			t.Helper()
			if err := tx.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		},
		"Rollback after a raw ROLLBACK": func(t *testing.T, tx inbox.Tx, native pgx.Tx) {
			t.Helper()
			exec(t, native, "ROLLBACK")
			if err := tx.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, _, _ := newStore(t, pgx.QueryExecModeCacheStatement)
			tx, native := begin(t, store, "id")
			objects := native.LargeObjects()
			oid, err := objects.Create(t.Context(), 0)
			if err != nil {
				t.Fatal(err)
			}
			object, err := objects.Open(t.Context(), oid, pgx.LargeObjectModeWrite)
			if err != nil {
				t.Fatal(err)
			}
			finish(t, tx, native)
			if _, err := object.Write([]byte("late")); !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("write after the end: %v", err)
			}
			if _, err := objects.Create(t.Context(), 0); !errors.Is(err, pgx.ErrTxClosed) {
				t.Errorf("create after the end: %v", err)
			}
		})
	}
}

func TestLargeObjectsAndOutputsNeedTheClaim(t *testing.T) {
	t.Parallel()
	store, pool, table := newStore(t, pgx.QueryExecModeCacheStatement)
	tx, native := begin(t, store, "id")
	objects := native.LargeObjects()
	if _, err := objects.Create(t.Context(), 0); err != nil {
		t.Fatal(err)
	}
	exec(t, native, "INSERT INTO "+effects(table)+" VALUES (1)")
	exec(t, native, "DELETE FROM "+table)
	wantError(t, tx.Commit(t.Context(), []*message.Message{output()}), "does not own its claim")
	if got := count(t, pool, effects(table)); got != 0 {
		t.Errorf("%d effects", got)
	}
}

func commit(t *testing.T, tx inbox.Tx, outputs ...*message.Message) {
	t.Helper()
	if err := tx.Commit(t.Context(), outputs); err != nil {
		t.Fatal(err)
	}
}
