package pgxstore_test

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
	"github.com/watermill-inbox/inbox/sqlstore/storetest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	forEachMode(t, func(t *testing.T, mode pgx.QueryExecMode) {
		storetest.Run(t, func(t *testing.T) *storetest.Harness {
			t.Helper()
			return newHarness(t, mode)
		})
	})
}

func BenchmarkStore(b *testing.B) {
	storetest.Benchmark(b, func(b *testing.B) *storetest.Harness {
		b.Helper()
		return newHarness(b, pgx.QueryExecModeCacheStatement)
	})
}

func newHarness(tb testing.TB, mode pgx.QueryExecMode) *storetest.Harness {
	tb.Helper()
	store, pool, table := newStore(tb, mode)
	exec(tb, pool, "ALTER TABLE "+effects(table)+" DROP COLUMN id, ADD COLUMN effect text")
	return &storetest.Harness{
		Store: store,
		Write: func(ctx context.Context, native any, effect string) error {
			_, err := native.(pgx.Tx).Exec(ctx, "INSERT INTO "+effects(table)+" VALUES ($1)", effect)
			return err
		},
		Effects: func(ctx context.Context) ([]string, error) {
			rows, err := pool.Query(ctx, "SELECT effect FROM "+effects(table))
			if err != nil {
				return nil, err
			}
			return pgx.CollectRows(rows, pgx.RowTo[string])
		},
		Another: func() (inbox.Store, error) { return pgxstore.New(pool, pgxstore.Config{Table: table}) },
		Kill: func(ctx context.Context, native any) error {
			_, err := pool.Exec(ctx, "SELECT pg_terminate_backend($1)", native.(pgx.Tx).Conn().PgConn().PID())
			return err
		},
		OnNewTable: func() (inbox.Store, error) {
			another := table + "_another"
			tb.Cleanup(func() {
				if _, err := pool.Exec(context.Background(), "DROP TABLE IF EXISTS "+another); err != nil { //nolint:usetesting // the test's context ended
					tb.Error(err)
				}
			})
			return pgxstore.New(pool, pgxstore.Config{Table: another})
		},
		Undo: func(ctx context.Context, native any) error {
			_, err := native.(pgx.Tx).Exec(ctx, "ROLLBACK")
			return err
		},
		LockTimeout: func(ctx context.Context, native any) (setting string, err error) {
			row := pool.QueryRow
			if tx, ok := native.(pgx.Tx); ok {
				row = tx.QueryRow
			}
			err = row(ctx, "SELECT current_setting('lock_timeout')").Scan(&setting)
			return setting, err
		},
		Transient: &pgconn.PgError{Code: "40001"},
		InUse:     func() int { return int(pool.Stat().AcquiredConns()) },
		CloseIdle: pool.Reset,
		Baseline: func(ctx context.Context, effect string) error {
			return pgx.BeginFunc(ctx, pool, func(tx pgx.Tx) error {
				_, err := tx.Exec(ctx, "INSERT INTO "+effects(table)+" VALUES ($1)", effect)
				return err
			})
		},
	}
}
