package crashtest_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"fmt"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"
	"go.uber.org/goleak"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/sqlstore"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

// Whatever was cut or stalled, no goroutine may be left of it.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stack is a driver with the store over it.
type stack struct {
	name   string
	server server
	open   func(t *testing.T, dsn, table string) *client

	// pipelined are steps that go to the server together, so that either may be named when their connection breaks.
	pipelined [][]string
}

// client is a store on a pool of one connection. A connection that is not given back ends the test.
type client struct {
	store  store
	effect func(ctx context.Context, table, id string) error // what the handler does
	inUse  func() int
	renew  func() // closes the idle connection
}

// store is what the tests need of a store beyond the contract.
type store interface {
	inbox.Store
	inbox.TransientClassifier
	inbox.OutputsMarker
	InitializeSchema(ctx context.Context) error
}

// server is a database server, as the tests look at it past the proxy.
type server struct {
	driver string
	dsn    func(testing.TB) string
}

var (
	postgreSQL = server{driver: "pgx", dsn: testenv.PostgreSQL}
	mariaDB    = server{driver: "mysql", dsn: testenv.MariaDB}
)

func stacks() []stack {
	return []stack{
		pgxStack(pgx.QueryExecModeCacheStatement),
		pgxStack(pgx.QueryExecModeSimpleProtocol),
		{name: "pgx-stdlib", server: postgreSQL, open: func(t *testing.T, dsn, table string) *client {
			t.Helper()
			return openSQL(t, openDB(t, "pgx", dsn), sqlstore.Config{Dialect: sqlstore.PostgreSQL, Table: table})
		}},
		{name: "lib-pq", server: postgreSQL, open: func(t *testing.T, dsn, table string) *client {
			t.Helper()
			return openSQL(t, openDB(t, "postgres", dsn), sqlstore.Config{Dialect: sqlstore.PostgreSQL, Table: table})
		}},
		mySQLStack("mariadb", func(connector driver.Connector) driver.Connector { return connector }),
		mySQLStack("mariadb-guarded", sqlstore.Guard),
	}
}

func pgxStack(mode pgx.QueryExecMode) stack {
	return stack{
		name:      "pgx-" + strings.ReplaceAll(mode.String(), " ", "-"),
		server:    postgreSQL,
		pipelined: [][]string{{beginStep, claimStep}, {sealStep, commitStep}},
		open: func(t *testing.T, dsn, table string) *client {
			t.Helper()
			config, err := pgxpool.ParseConfig(dsn)
			if err != nil {
				t.Fatal(err)
			}
			config.MaxConns = 1
			config.ConnConfig.DefaultQueryExecMode = mode
			pool, err := pgxpool.NewWithConfig(t.Context(), config)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(pool.Close)
			store, err := pgxstore.New(pool, pgxstore.Config{Table: table})
			if err != nil {
				t.Fatal(err)
			}
			return &client{
				store: store,
				effect: func(ctx context.Context, table, id string) error {
					tx, _ := inbox.TxFromContext[pgx.Tx](ctx)
					_, err := tx.Exec(ctx, "INSERT INTO "+table+" (message_id) VALUES ($1)", id)
					return err
				},
				inUse: func() int { return int(pool.Stat().AcquiredConns()) },
				renew: pool.Reset,
			}
		},
	}
}

func mySQLStack(name string, guard func(driver.Connector) driver.Connector) stack {
	return stack{name: name, server: mariaDB, open: func(t *testing.T, dsn, table string) *client {
		t.Helper()
		config, err := mysql.ParseDSN(dsn)
		if err != nil {
			t.Fatal(err)
		}
		config.ReadTimeout = readTimeout
		config.Logger = &mysql.NopLogger{} // it tells of every cut
		connector, err := mysql.NewConnector(config)
		if err != nil {
			t.Fatal(err)
		}
		db := sql.OpenDB(guard(connector))
		t.Cleanup(func() { _ = db.Close() })
		return openSQL(t, db, sqlstore.Config{Dialect: sqlstore.MySQL, Table: table})
	}}
}

// readTimeout is what bounds a COMMIT on MySQL.
const readTimeout = 2 * time.Second

func openDB(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = db.Close() })
	return db
}

func openSQL(t *testing.T, db *sql.DB, config sqlstore.Config) *client {
	t.Helper()
	db.SetMaxOpenConns(1)
	store, err := sqlstore.New(db, config)
	if err != nil {
		t.Fatal(err)
	}
	placeholder := "$1"
	if config.Dialect == sqlstore.MySQL {
		placeholder = "?"
	}
	return &client{
		store: store,
		effect: func(ctx context.Context, table, id string) error {
			tx, _ := inbox.TxFromContext[*sql.Tx](ctx)
			_, err := tx.ExecContext(ctx, "INSERT INTO "+table+" (message_id) VALUES ("+placeholder+")", id)
			return err
		},
		inUse: func() int { return db.Stats().InUse },
		renew: func() {
			db.SetMaxIdleConns(-1)
			db.SetMaxIdleConns(1)
		},
	}
}

var tables atomic.Int64

// createTables creates an inbox and a table for the handler's effects, both dropped at the end.
func createTables(t *testing.T, stack stack, control *sql.DB) (inboxTable, effects string) {
	t.Helper()
	suffix := fmt.Sprintf("%x_%d", time.Now().UnixNano(), tables.Add(1))
	inboxTable, effects = "i_"+suffix, "e_"+suffix
	if err := stack.open(t, stack.server.dsn(t), inboxTable).store.InitializeSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := control.ExecContext(t.Context(), "CREATE TABLE "+effects+" (message_id varchar(64) NOT NULL)"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for _, table := range []string{inboxTable, effects} {
			if _, err := control.ExecContext(context.WithoutCancel(t.Context()), "DROP TABLE "+table); err != nil {
				t.Errorf("drop %s: %v", table, err)
			}
		}
	})
	return inboxTable, effects
}
