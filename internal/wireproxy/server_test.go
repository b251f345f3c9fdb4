package wireproxy_test

import (
	"context"
	"database/sql"
	"testing"

	_ "github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"

	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/internal/wireproxy"
)

func open(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	db.SetMaxOpenConns(1)
	t.Cleanup(func() { _ = db.Close() })
	if err := db.PingContext(t.Context()); err != nil {
		t.Fatal(err)
	}
	return db
}

// transaction is BEGIN, one statement, COMMIT: three round trips, or four where the statement has to be prepared.
func transaction(ctx context.Context, db *sql.DB, statement string, args ...any) error {
	tx, err := db.BeginTx(ctx, nil)
	if err != nil {
		return err
	}
	if _, err := tx.ExecContext(ctx, statement, args...); err != nil {
		_ = tx.Rollback()
		return err
	}
	return tx.Commit()
}

func TestRoundTripsOfDatabaseSQL(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		driver, statement string
		dsn               func(testing.TB) string
		want              int
	}{
		{"pgx", "SELECT $1::int", testenv.PostgreSQL, 3},
		{"postgres", "SELECT $1::int", testenv.PostgreSQL, 4}, // prepares every time
		{"mysql", "DO ?", testenv.MariaDB, 4},                 // prepares every time, and closes without an answer
	} {
		t.Run("driver="+test.driver, func(t *testing.T) {
			t.Parallel()
			proxy, dsn := wireproxy.Through(t, test.dsn(t))
			db := open(t, test.driver, dsn)
			for range 3 { // in the first one pgx prepares
				proxy.Reset()
				if err := transaction(t.Context(), db, test.statement, 1); err != nil {
					t.Fatal(err)
				}
			}
			wantRoundTrips(t, proxy, test.want)
			if byConn := proxy.Snapshot().ByConn; byConn[1] != test.want || len(byConn) != 1 {
				t.Errorf("round trips by connection: %v, want all on the first", byConn)
			}
		})
	}
}

func TestRoundTripsOfAPgxBatch(t *testing.T) {
	t.Parallel()
	for _, test := range []struct {
		mode pgx.QueryExecMode
		want int
	}{
		{pgx.QueryExecModeCacheStatement, 1},
		{pgx.QueryExecModeCacheDescribe, 1},
		{pgx.QueryExecModeDescribeExec, 2},
		{pgx.QueryExecModeExec, 1},
		{pgx.QueryExecModeSimpleProtocol, 1},
	} {
		t.Run("mode="+test.mode.String(), func(t *testing.T) {
			t.Parallel()
			proxy, dsn := wireproxy.Through(t, testenv.PostgreSQL(t))
			config, err := pgx.ParseConfig(dsn)
			if err != nil {
				t.Fatal(err)
			}
			config.DefaultQueryExecMode = test.mode
			conn, err := pgx.ConnectConfig(t.Context(), config)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close(context.WithoutCancel(t.Context()))
			for range 2 { // in the first one it prepares
				proxy.Reset()
				var batch pgx.Batch
				batch.Queue("SELECT $1::int", 1)
				batch.Queue("SELECT $1::text", "x")
				if err := conn.SendBatch(t.Context(), &batch).Close(); err != nil {
					t.Fatal(err)
				}
			}
			wantRoundTrips(t, proxy, test.want)
		})
	}
}
