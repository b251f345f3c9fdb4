package sqlstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
	"github.com/watermill-inbox/inbox/sqlstore/storetest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	for _, target := range targets() {
		t.Run(target.name, func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) *storetest.Harness {
				t.Helper()
				return newHarness(t, target)
			})
		})
	}
}

func BenchmarkStore(b *testing.B) {
	for _, target := range []target{pgxStdlib, libPQ, mariaDB, sqliteSeveral} {
		b.Run("database="+target.name, func(b *testing.B) {
			storetest.Benchmark(b, func(b *testing.B) *storetest.Harness {
				b.Helper()
				return newHarness(b, target)
			})
		})
	}
}

func newHarness(tb testing.TB, target target) *storetest.Harness {
	tb.Helper()
	store, db, table := newStore(tb, target)
	db.SetMaxIdleConns(10) // so that workers of benchmarks keep theirs
	effects := newTable(tb, db)
	kind, insert := "text", "INSERT INTO "+effects+" VALUES ($1)"
	switch target.dialect {
	case sqlstore.MySQL:
		kind, insert = "VARBINARY(1000)", "INSERT INTO "+effects+" VALUES (?)"
	case sqlstore.SQLite:
		insert = "INSERT INTO " + effects + " VALUES (?)"
	}
	mustExec(tb, db, "CREATE TABLE "+effects+" (effect "+kind+")")
	h := &storetest.Harness{
		Store: store,
		Write: func(ctx context.Context, native any, effect string) error {
			_, err := native.(*sql.Tx).ExecContext(ctx, insert, effect)
			return err
		},
		Effects: func(ctx context.Context) ([]string, error) {
			rows, err := db.QueryContext(ctx, "SELECT effect FROM "+effects)
			if err != nil {
				return nil, err
			}
			defer func() { _ = rows.Close() }()
			var found []string
			for rows.Next() {
				var effect string
				if err := rows.Scan(&effect); err != nil {
					return nil, err
				}
				found = append(found, effect)
			}
			return found, rows.Err()
		},
		Another: func() (inbox.Store, error) {
			return sqlstore.New(db, sqlstore.Config{Dialect: target.dialect, Table: table})
		},
		OnNewTable: func() (inbox.Store, error) {
			return sqlstore.New(db, sqlstore.Config{Dialect: target.dialect, Table: newTable(tb, db)})
		},
		Undo: func(ctx context.Context, native any) error {
			_, err := native.(*sql.Tx).ExecContext(ctx, "ROLLBACK")
			return err
		},
		InUse:     func() int { return db.Stats().InUse },
		CloseIdle: func() { db.SetMaxIdleConns(-1) },
		Baseline: func(ctx context.Context, effect string) error {
			tx, err := db.BeginTx(ctx, nil)
			if err != nil {
				return err
			}
			defer func() { _ = tx.Rollback() }()
			if _, err := tx.ExecContext(ctx, insert, effect); err != nil {
				return err
			}
			return tx.Commit()
		},
	}
	switch target.dialect {
	case sqlstore.SQLite:
		h.Serial = "SQLite has one writing transaction at a time"
		h.LockTimeout = settingWith(db, "PRAGMA busy_timeout")
	case sqlstore.PostgreSQL:
		h.Kill = killWith(db, "SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%d)")
		h.LockTimeout = settingWith(db, "SELECT current_setting('lock_timeout')")
		h.Transient = &pgconn.PgError{Code: "40001"}
	case sqlstore.MySQL:
		h.Kill = killWith(db, "SELECT CONNECTION_ID()", "KILL %d")
		h.LockTimeout = settingWith(db, "SELECT @@innodb_lock_wait_timeout")
		h.Transient = &mysql.MySQLError{Number: 1213}
	}
	return h
}

// settingWith asks for a setting, in a transaction or in none.
func settingWith(db *sql.DB, ask string) func(context.Context, any) (string, error) {
	return func(ctx context.Context, native any) (setting string, err error) {
		row := db.QueryRowContext
		if tx, ok := native.(*sql.Tx); ok {
			row = tx.QueryRowContext
		}
		err = row(ctx, ask).Scan(&setting)
		return setting, err
	}
}

// killWith cuts a connection from another one.
func killWith(db *sql.DB, ask, kill string) func(context.Context, any) error {
	return func(ctx context.Context, native any) error {
		var id int
		if err := native.(*sql.Tx).QueryRowContext(ctx, ask).Scan(&id); err != nil {
			return err
		}
		_, err := db.ExecContext(ctx, fmt.Sprintf(kill, id))
		return err
	}
}
