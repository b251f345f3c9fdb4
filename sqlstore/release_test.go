package sqlstore_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"sync"
	"testing"

	"github.com/watermill-inbox/inbox/sqlstore"
)

// dyingDriver's connections are lost when the context of their first statement ends, which it does at once. So
// database/sql closes each at the moment at which the store rolls back.
type dyingDriver struct{ plainDriver }

func (d dyingDriver) Connect(context.Context) (driver.Conn, error) { return dyingConn{}, nil }

type dyingConn struct{ plainConn }

type cancelKey struct{}

func (dyingConn) BeginTx(context.Context, driver.TxOptions) (driver.Tx, error) { return dyingTx{}, nil }

func (dyingConn) ExecContext(ctx context.Context, _ string, _ []driver.NamedValue) (driver.Result, error) {
	if cancel, ok := ctx.Value(cancelKey{}).(context.CancelFunc); ok {
		cancel()
	}
	return nil, driver.ErrBadConn
}

type dyingTx struct{}

func (dyingTx) Commit() error   { return driver.ErrBadConn }
func (dyingTx) Rollback() error { return driver.ErrBadConn }

// TestConnectionThatDatabaseSQLClosesMeanwhile covers a race in database/sql: a *sql.Conn that is closed while a method
// begins panics with a nil pointer, where it should return sql.ErrConnDone.
func TestConnectionThatDatabaseSQLClosesMeanwhile(t *testing.T) {
	t.Parallel()
	db := sql.OpenDB(dyingDriver{})
	defer db.Close()
	store := storeOn(t, db, sqlstore.Config{Dialect: sqlstore.PostgreSQL, DisablePreparedStatements: true})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for range 5_000 {
				ctx, cancel := context.WithCancel(context.Background())
				_, err := store.Begin(context.WithValue(ctx, cancelKey{}, cancel), claimOf("id"))
				if !errors.Is(err, context.Canceled) {
					t.Errorf("error %v", err)
					return
				}
			}
		})
	}
	wg.Wait()
	if inUse := db.Stats().InUse; inUse != 0 {
		t.Errorf("%d connections are in use", inUse)
	}
}
