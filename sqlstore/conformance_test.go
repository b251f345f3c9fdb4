package sqlstore_test

import (
	"context"
	"database/sql"
	"fmt"
	"testing"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore"
	"github.com/watermill-inbox/inbox/sqlstore/storetest"
)

func TestConformance(t *testing.T) {
	t.Parallel()
	for _, target := range append(targets(), guardedSQLite, guardedMariaDB) {
		t.Run(target.name, func(t *testing.T) {
			t.Parallel()
			storetest.Run(t, func(t *testing.T) *storetest.Harness {
				t.Helper()
				return newHarness(t, target)
			})
		})
	}
}

func newHarness(t *testing.T, target target) *storetest.Harness {
	t.Helper()
	store, db, table := newStore(t, target)
	effects := newTable(t, db)
	kind, insert := "text", "INSERT INTO "+effects+" VALUES ($1)"
	switch target.dialect {
	case sqlstore.MySQL:
		kind, insert = "VARBINARY(1000)", "INSERT INTO "+effects+" VALUES (?)"
	case sqlstore.SQLite:
		insert = "INSERT INTO " + effects + " VALUES (?)"
	}
	mustExec(t, db, "CREATE TABLE "+effects+" (effect "+kind+")")
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
		InUse: func() int { return db.Stats().InUse },
	}
	switch target.dialect {
	case sqlstore.SQLite:
		h.Serial = "SQLite has one writing transaction at a time"
	case sqlstore.PostgreSQL:
		h.Kill = killWith(db, "SELECT pg_backend_pid()", "SELECT pg_terminate_backend(%d)")
	case sqlstore.MySQL:
		h.Kill = killWith(db, "SELECT CONNECTION_ID()", "KILL %d")
	}
	return h
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
