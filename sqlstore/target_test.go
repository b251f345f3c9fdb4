package sqlstore_test

import (
	"database/sql"
	"errors"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "github.com/lib/pq"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/sqlstore"
)

// target is a database, and the way to it.
type target struct {
	name    string
	dialect sqlstore.Dialect
	open    func(t *testing.T) *sql.DB
}

func postgresDSN(t *testing.T) string {
	t.Helper()
	return testenv.PostgreSQL(t)
}

func mariaDBDSN(t *testing.T) string {
	t.Helper()
	return testenv.MariaDB(t)
}

func targets() []target {
	return []target{
		pgxStdlib, pgxSimple, libPQ, libPQBinary, mariaDB, mariaDBFoundRows, guardedMariaDB, sqliteOne, sqliteSeveral, guardedSQLite,
	}
}

var (
	pgxStdlib = target{"pgx-stdlib", sqlstore.PostgreSQL, func(t *testing.T) *sql.DB {
		t.Helper()
		return open(t, "pgx", postgresDSN(t))
	}}
	pgxSimple = target{"pgx-simple", sqlstore.PostgreSQL, func(t *testing.T) *sql.DB {
		t.Helper()
		return open(t, "pgx", withParam(postgresDSN(t), "default_query_exec_mode=simple_protocol"))
	}}
	libPQ = target{"lib-pq", sqlstore.PostgreSQL, func(t *testing.T) *sql.DB {
		t.Helper()
		return open(t, "postgres", postgresDSN(t))
	}}
	// libPQBinary is how lib/pq works behind PgBouncer in transaction mode.
	libPQBinary = target{"lib-pq-binary", sqlstore.PostgreSQL, func(t *testing.T) *sql.DB {
		t.Helper()
		return open(t, "postgres", withParam(postgresDSN(t), "binary_parameters=yes"))
	}}
	mariaDB = target{"mariadb", sqlstore.MySQL, func(t *testing.T) *sql.DB {
		t.Helper()
		return open(t, "mysql", mysqlDSN(t, func(*mysql.Config) {}))
	}}
	mariaDBFoundRows = target{"mariadb-found-rows", sqlstore.MySQL, func(t *testing.T) *sql.DB {
		t.Helper()
		return open(t, "mysql", mysqlDSN(t, func(c *mysql.Config) { c.ClientFoundRows = true }))
	}}
	sqliteOne = target{"sqlite-one", sqlstore.SQLite, func(t *testing.T) *sql.DB {
		t.Helper()
		db := open(t, "sqlite", sqliteDSN(t, busyTimeout))
		db.SetMaxOpenConns(1)
		return db
	}}
	sqliteSeveral = target{"sqlite-several", sqlstore.SQLite, func(t *testing.T) *sql.DB {
		t.Helper()
		return open(t, "sqlite", sqliteDSN(t, busyTimeout))
	}}
)

const busyTimeout = 10 * time.Second

func sqliteDSN(t *testing.T, busyTimeout time.Duration) string {
	t.Helper()
	path := url.URL{Path: filepath.Join(t.TempDir(), "inbox.db")} // a test's name may hold a #
	return fmt.Sprintf("file:%s?_pragma=journal_mode(WAL)&_pragma=busy_timeout(%d)",
		path.EscapedPath(), busyTimeout.Milliseconds())
}

func mysqlDSN(t *testing.T, change func(*mysql.Config)) string {
	t.Helper()
	config, err := mysql.ParseDSN(mariaDBDSN(t))
	if err != nil {
		t.Fatal(err)
	}
	config.ReadTimeout = time.Minute
	change(config)
	return config.FormatDSN()
}

func withParam(dsn, param string) string {
	if !strings.Contains(dsn, "://") {
		return dsn + " " + param
	}
	if strings.Contains(dsn, "?") {
		return dsn + "&" + param
	}
	return dsn + "?" + param
}

func open(t *testing.T, driver, dsn string) *sql.DB {
	t.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if inUse := db.Stats().InUse; inUse != 0 {
			t.Errorf("%d connections are still in use", inUse)
		}
		_ = db.Close() // which may say that a connection was lost
	})
	return db
}

var tables atomic.Int64

// newTableName returns a name that no other test has.
func newTableName() string {
	return fmt.Sprintf("inbox_%d_%d_%d", os.Getpid(), time.Now().UnixNano()%1e9, tables.Add(1))
}

// newTable returns the name of a table that does not exist yet and is dropped after the test.
func newTable(t *testing.T, db *sql.DB) string {
	t.Helper()
	name := newTableName()
	t.Cleanup(func() {
		if _, err := db.Exec("DROP TABLE IF EXISTS " + name); err != nil { //nolint:usetesting,noctx // the test's context ended
			t.Error(err)
		}
	})
	return name
}

// newStore returns a store on a table of its own.
func newStore(t *testing.T, target target) (*sqlstore.Store, *sql.DB, string) {
	t.Helper()
	db := target.open(t)
	table := newTable(t, db)
	store := storeOn(t, db, sqlstore.Config{Dialect: target.dialect, Table: table})
	if err := store.InitializeSchema(t.Context()); err != nil {
		t.Fatal(err)
	}
	return store, db, table
}

func storeOn(t *testing.T, db *sql.DB, config sqlstore.Config) *sqlstore.Store {
	t.Helper()
	store, err := sqlstore.New(db, config)
	if err != nil {
		t.Fatal(err)
	}
	return store
}

func claimOf(id string) inbox.Claim {
	return inbox.Claim{Key: inbox.Key{Consumer: "orders", MessageID: id}, LockTimeout: 10 * time.Second}
}

// begin claims a key that nobody else has.
func begin(t *testing.T, store inbox.Store, id string) (inbox.Tx, *sql.Tx) {
	t.Helper()
	tx, err := store.Begin(t.Context(), claimOf(id))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = tx.Rollback(t.Context()) })
	if tx.Recorded() != nil {
		t.Fatalf("%s is recorded already", id)
	}
	return tx, tx.Native().(*sql.Tx)
}

// process processes a message.
func process(t *testing.T, store inbox.Store, id string, outputs ...*message.Message) {
	t.Helper()
	tx, _ := begin(t, store, id)
	if err := tx.Commit(t.Context(), outputs); err != nil {
		t.Fatal(err)
	}
}

// recorded returns the record of a key that was processed.
func recorded(t *testing.T, store inbox.Store, id string) *inbox.Record {
	t.Helper()
	tx, err := store.Begin(t.Context(), claimOf(id))
	if err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if tx.Recorded() == nil {
		t.Fatalf("%s is not recorded", id)
	}
	return tx.Recorded()
}

// wantUnclaimed checks that a key can be claimed.
func wantUnclaimed(t *testing.T, store inbox.Store, id string) {
	t.Helper()
	tx, _ := begin(t, store, id)
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
}

func mustExec(t *testing.T, db interface {
	Exec(query string, args ...any) (sql.Result, error)
}, query string, args ...any,
) {
	t.Helper()
	if _, err := db.Exec(query, args...); err != nil {
		t.Fatalf("%s: %v", query, err)
	}
}

// forEach runs a test against each of the targets.
func forEach(t *testing.T, targets []target, test func(t *testing.T, target target)) {
	t.Helper()
	for _, target := range targets {
		t.Run(target.name, func(t *testing.T) {
			t.Parallel()
			test(t, target)
		})
	}
}

// newEffects returns the name of a table for handlers to write to, with a column id.
func newEffects(t *testing.T, db *sql.DB) string {
	t.Helper()
	name := newTable(t, db)
	engine := ""
	if _, ok := db.Driver().(*mysql.MySQLDriver); ok {
		engine = " ENGINE = InnoDB"
	}
	mustExec(t, db, "CREATE TABLE "+name+" (id INTEGER PRIMARY KEY)"+engine)
	return name
}

// wantCount checks how many rows a table has.
func wantCount(t *testing.T, db *sql.DB, table string, want int) {
	t.Helper()
	var got int
	if err := db.QueryRowContext(t.Context(), "SELECT count(*) FROM "+table).Scan(&got); err != nil {
		t.Fatal(err)
	}
	if got != want {
		t.Errorf("table %s has %d rows, want %d", table, got, want)
	}
}

// wantError checks that err is target, if there is one, and says what the user has to know.
func wantError(t *testing.T, err, target error, texts ...string) {
	t.Helper()
	if err == nil {
		t.Fatal("no error")
	}
	if target != nil && !errors.Is(err, target) {
		t.Errorf("error %q is not %q", err, target)
	}
	for _, text := range texts {
		if !strings.Contains(err.Error(), text) {
			t.Errorf("error %q does not say %q", err, text)
		}
	}
}
