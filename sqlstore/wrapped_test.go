package sqlstore_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"testing"

	"github.com/jackc/pgx/v5/stdlib"

	"github.com/watermill-inbox/inbox/sqlstore"
)

// pgxWrapped hides pgx in another driver, as instrumentation does, so that the session's state cannot be seen.
var pgxWrapped = target{"pgx-wrapped", sqlstore.PostgreSQL, func(tb testing.TB) *sql.DB {
	tb.Helper()
	return open(tb, "pgx-wrapped", postgresDSN(tb))
}}

func init() { sql.Register("pgx-wrapped", wrappedDriver{}) }

type wrappedDriver struct{}

func (wrappedDriver) Open(name string) (driver.Conn, error) {
	conn, err := stdlib.GetDefaultDriver().Open(name)
	if err != nil {
		return nil, err
	}
	return wrappedConn{conn.(pgxConn)}, nil
}

// pgxConn is what database/sql uses of pgx.
type pgxConn interface {
	driver.Conn
	driver.ConnBeginTx
	driver.ConnPrepareContext
	driver.ExecerContext
	driver.QueryerContext
	driver.NamedValueChecker
	driver.SessionResetter
}

type wrappedConn struct{ pgxConn }

var _ interface {
	BeginTx(context.Context, driver.TxOptions) (driver.Tx, error)
} = wrappedConn{}
