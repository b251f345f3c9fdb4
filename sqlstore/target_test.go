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
	open    func(tb testing.TB) *sql.DB
}

func postgresDSN(tb testing.TB) string {
	tb.Helper()
	return testenv.PostgreSQL(tb)
}

func mariaDBDSN(tb testing.TB) string {
	tb.Helper()
	return testenv.MariaDB(tb)
}

func targets() []target {
	return []target{
		pgxStdlib, pgxSimple, libPQ, libPQBinary, mariaDB, mariaDBFoundRows, guardedMariaDB, sqliteOne, sqliteSeveral, guardedSQLite,
	}
}

var (
	pgxStdlib = target{"pgx-stdlib", sqlstore.PostgreSQL, func(tb testing.TB) *sql.DB {
		tb.Helper()
		return open(tb, "pgx", postgresDSN(tb))
	}}
	pgxSimple = target{"pgx-simple", sqlstore.PostgreSQL, func(tb testing.TB) *sql.DB {
		tb.Helper()
		return open(tb, "pgx", withParam(postgresDSN(tb), "default_query_exec_mode=simple_protocol"))
	}}
	libPQ = target{"lib-pq", sqlstore.PostgreSQL, func(tb testing.TB) *sql.DB {
		tb.Helper()
		return open(tb, "postgres", postgresDSN(tb))
	}}
	// libPQBinary is how lib/pq works behind PgBouncer in transaction mode.
	libPQBinary = target{"lib-pq-binary", sqlstore.PostgreSQL, func(tb testing.TB) *sql.DB {
		tb.Helper()
		return open(tb, "postgres", withParam(postgresDSN(tb), "binary_parameters=yes"))
	}}
	mariaDB = target{"mariadb", sqlstore.MySQL, func(tb testing.TB) *sql.DB {
		tb.Helper()
		return open(tb, "mysql", mysqlDSN(tb, func(*mysql.Config) {}))
	}}
	mariaDBFoundRows = target{"mariadb-found-rows", sqlstore.MySQL, func(tb testing.TB) *sql.DB {
		tb.Helper()
		return open(tb, "mysql", mysqlDSN(tb, func(c *mysql.Config) { c.ClientFoundRows = true }))
	}}
	sqliteOne = target{"sqlite-one", sqlstore.SQLite, func(tb testing.TB) *sql.DB {
		tb.Helper()
		db := open(tb, "sqlite", sqliteDSN(tb, busyTimeout))
		db.SetMaxOpenConns(1)
		return db
	}}
	sqliteSeveral = target{"sqlite-several", sqlstore.SQLite, func(tb testing.TB) *sql.DB {
		tb.Helper()
		return open(tb, "sqlite", sqliteDSN(tb, busyTimeout))
	}}
)

const busyTimeout = 10 * time.Second

func sqliteDSN(tb testing.TB, busyTimeout time.Duration) string {
	tb.Helper()
	path := url.URL{Path: filepath.Join(tb.TempDir(), "inbox.db")} // a test's name may hold a #
	return fmt.Sprintf("file:%s?_pragma=journal_mode(WAL)&_pragma=busy_timeout(%d)",
		path.EscapedPath(), busyTimeout.Milliseconds())
}

func mysqlDSN(tb testing.TB, change func(*mysql.Config)) string {
	tb.Helper()
	config, err := mysql.ParseDSN(mariaDBDSN(tb))
	if err != nil {
		tb.Fatal(err)
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

func open(tb testing.TB, driver, dsn string) *sql.DB {
	tb.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if inUse := db.Stats().InUse; inUse != 0 {
			tb.Errorf("%d connections are still in use", inUse)
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
func newTable(tb testing.TB, db *sql.DB) string {
	tb.Helper()
	name := newTableName()
	tb.Cleanup(func() {
		if _, err := db.Exec("DROP TABLE IF EXISTS " + name); err != nil { //nolint:usetesting,noctx // the test's context ended
			tb.Error(err)
		}
	})
	return name
}

// newStore returns a store on a table of its own.
func newStore(tb testing.TB, target target) (*sqlstore.Store, *sql.DB, string) {
	tb.Helper()
	db := target.open(tb)
	table := newTable(tb, db)
	store := storeOn(tb, db, sqlstore.Config{Dialect: target.dialect, Table: table})
	if err := store.InitializeSchema(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	return store, db, table
}

func storeOn(tb testing.TB, db *sql.DB, config sqlstore.Config) *sqlstore.Store {
	tb.Helper()
	store, err := sqlstore.New(db, config)
	if err != nil {
		tb.Fatal(err)
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

func mustExec(tb testing.TB, db interface {
	Exec(query string, args ...any) (sql.Result, error)
}, query string, args ...any,
) {
	tb.Helper()
	if _, err := db.Exec(query, args...); err != nil {
		tb.Fatalf("%s: %v", query, err)
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
