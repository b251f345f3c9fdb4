package cleanup_test

import (
	"context"
	"database/sql"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	_ "github.com/jackc/pgx/v5/stdlib"
	_ "modernc.org/sqlite"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/cleanup"
	"github.com/watermill-inbox/inbox/internal/testenv"
	"github.com/watermill-inbox/inbox/sqlstore"
	"github.com/watermill-inbox/inbox/sqlstore/pgxstore"
)

var (
	_ cleanup.Store           = (*sqlstore.Store)(nil)
	_ cleanup.AgeReporter     = (*sqlstore.Store)(nil)
	_ cleanup.StrandedCounter = (*sqlstore.Store)(nil)
	_ cleanup.Store           = (*pgxstore.Store)(nil)
	_ cleanup.AgeReporter     = (*pgxstore.Store)(nil)
	_ cleanup.StrandedCounter = (*pgxstore.Store)(nil)
)

// database is a kind of database, and what the tests need to say in its own words.
type database struct {
	name    string
	dialect sqlstore.Dialect

	// open returns a pool of its own. Its sessions are in the time zone, which is an offset such as +13:00, or "".
	open func(tb testing.TB, file, timeZone string) *sql.DB

	// past is an expression for a column, but so many microseconds earlier.
	past string

	// fill inserts rows of the consumer "old" that are older than 30 days. Its verbs are the table, how many rows there
	// are, and an expression for their IDs, which randomID and orderedID are.
	fill, randomID, orderedID string
}

var (
	postgreSQL = database{
		name:    "postgresql",
		dialect: sqlstore.PostgreSQL,
		open: func(tb testing.TB, _, timeZone string) *sql.DB {
			tb.Helper()
			dsn := testenv.PostgreSQL(tb)
			if timeZone != "" {
				parsed, err := url.Parse(dsn)
				if err != nil {
					tb.Fatal(err)
				}
				query := parsed.Query()
				query.Set("timezone", "<zone>"+invert(timeZone)) // POSIX counts to the west
				parsed.RawQuery = query.Encode()
				dsn = parsed.String()
			}
			return open(tb, "pgx", dsn)
		},
		past: "%[1]s - interval '%[2]d microseconds'",
		fill: `
INSERT INTO %[1]s (consumer, message_id, received_at, processed_at)
SELECT 'old', %[3]s, now() - interval '30 days' + i * interval '1 microsecond', now() - interval '30 days' + i * interval '1 microsecond'
FROM generate_series(1, %[2]d) AS i`,
		randomID:  `md5(random()::text || i)`,
		orderedID: `lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000000)::bigint), 16, '0') || lpad(to_hex(i), 16, '0')`,
	}
	mariaDB = database{
		name:    "mariadb",
		dialect: sqlstore.MySQL,
		open: func(tb testing.TB, _, timeZone string) *sql.DB {
			tb.Helper()
			config, err := mysql.ParseDSN(testenv.MariaDB(tb))
			if err != nil {
				tb.Fatal(err)
			}
			config.ReadTimeout = time.Minute
			if timeZone != "" {
				config.Params = map[string]string{"time_zone": "'" + timeZone + "'"}
				config.ParseTime = true
				config.Loc = time.FixedZone("", -5*60*60)
			}
			return open(tb, "mysql", config.FormatDSN())
		},
		past: "%[1]s - INTERVAL %[2]d MICROSECOND",
		fill: `
INSERT INTO %[1]s (consumer, message_id, received_at, processed_at)
SELECT 'old', %[3]s, UTC_TIMESTAMP(6) - INTERVAL 30 DAY + INTERVAL seq MICROSECOND, UTC_TIMESTAMP(6) - INTERVAL 30 DAY + INTERVAL seq MICROSECOND
FROM seq_1_to_%[2]d`,
		randomID:  `MD5(CONCAT(RAND(), seq))`,
		orderedID: `LPAD(HEX(UNIX_TIMESTAMP(SYSDATE(6)) * 10000000000 + seq), 32, '0')`,
	}
	sqlite = database{
		name:    "sqlite",
		dialect: sqlstore.SQLite,
		open: func(tb testing.TB, file, _ string) *sql.DB {
			tb.Helper()
			return open(tb, "sqlite", "file:"+file+"?_pragma=journal_mode(WAL)&_pragma=busy_timeout(10000)&_pragma=synchronous(NORMAL)")
		},
		past: "strftime('%%Y-%%m-%%d %%H:%%M:%%f', %[1]s, (%[2]d / -1000000.0) || ' seconds')",
		fill: `
WITH RECURSIVE s (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM s WHERE i < %[2]d)
INSERT INTO %[1]s (consumer, message_id, received_at, processed_at)
SELECT 'old', %[3]s, strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '-30 days', (i / 1000.0) || ' seconds'),
	strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '-30 days', (i / 1000.0) || ' seconds')
FROM s`,
		randomID:  `hex(randomblob(16))`,
		orderedID: `printf('%016x%016x', (julianday('now') - 2440587.5) * 86400000, i)`,
	}
)

func databases() []database { return []database{postgreSQL, mariaDB, sqlite} }

func forEachDatabase(t *testing.T, databases []database, test func(t *testing.T, database database)) {
	t.Helper()
	for _, database := range databases {
		t.Run(database.name, func(t *testing.T) {
			t.Parallel()
			test(t, database)
		})
	}
}

func invert(offset string) string {
	if offset[0] == '-' {
		return "+" + offset[1:]
	}
	return "-" + offset[1:]
}

func open(tb testing.TB, driver, dsn string) *sql.DB {
	tb.Helper()
	db, err := sql.Open(driver, dsn)
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() {
		if err := db.Close(); err != nil {
			tb.Error(err)
		}
	})
	return db
}

// table is an inbox table of a test's own, and a table for the effects of handlers.
type table struct {
	database
	name, effects string
	file          string // of SQLite
	db            *sql.DB
	store         *sqlstore.Store
}

var tables atomic.Int64

func newTable(tb testing.TB, database database) *table {
	tb.Helper()
	t := &table{
		database: database,
		name:     fmt.Sprintf("inbox_%d_%d_%d", os.Getpid(), time.Now().UnixNano()%1e9, tables.Add(1)),
		file:     filepath.Join(tb.TempDir(), "inbox.db"),
	}
	t.effects = t.name + "_effects"
	t.db = database.open(tb, t.file, "")
	tb.Cleanup(func() {
		for _, name := range []string{t.name, t.effects} {
			if _, err := t.db.Exec("DROP TABLE IF EXISTS " + name); err != nil { //nolint:noctx // the test's context ended
				tb.Error(err)
			}
		}
	})
	t.store = t.storeOn(tb, t.db)
	if err := t.store.InitializeSchema(tb.Context()); err != nil {
		tb.Fatal(err)
	}
	t.exec(tb, "CREATE TABLE "+t.effects+" (id VARCHAR(64) PRIMARY KEY)")
	return t
}

// storeOn returns a store for the table on another pool.
func (t *table) storeOn(tb testing.TB, db *sql.DB) *sqlstore.Store {
	tb.Helper()
	store, err := sqlstore.New(db, sqlstore.Config{Dialect: t.dialect, Table: t.name})
	if err != nil {
		tb.Fatal(err)
	}
	return store
}

func (t *table) exec(tb testing.TB, query string) {
	tb.Helper()
	if _, err := t.db.ExecContext(tb.Context(), query); err != nil {
		tb.Fatalf("%s: %v", query, err)
	}
}

// fillWith inserts expired records.
func (t *table) fillWith(tb testing.TB, rows int, id string) {
	tb.Helper()
	t.exec(tb, fmt.Sprintf(t.fill, t.name, rows, id))
}

// age makes a record older, by the database's clock.
func (t *table) age(tb testing.TB, id string, by time.Duration) {
	tb.Helper()
	t.exec(tb, fmt.Sprintf("UPDATE %s SET received_at = %s, processed_at = %s WHERE message_id = '%s'", t.name,
		fmt.Sprintf(t.past, "received_at", by.Microseconds()), fmt.Sprintf(t.past, "processed_at", by.Microseconds()), id))
}

func (t *table) count(tb testing.TB, from string) int {
	tb.Helper()
	var n int
	if err := t.db.QueryRowContext(tb.Context(), "SELECT count(*) FROM "+from).Scan(&n); err != nil {
		tb.Fatal(err)
	}
	return n
}

func (t *table) has(tb testing.TB, id string) bool {
	tb.Helper()
	return t.count(tb, t.name+" WHERE message_id = '"+id+"'") == 1
}

func newDeduplicator(tb testing.TB, store inbox.Store) *inbox.Deduplicator {
	tb.Helper()
	deduplicator, err := inbox.NewDeduplicator(inbox.Config{Store: store})
	if err != nil {
		tb.Fatal(err)
	}
	return deduplicator
}

// process processes a message whose handler writes its ID.
func (t *table) process(ctx context.Context, deduplicator *inbox.Deduplicator, id string) error {
	return deduplicator.Process(ctx, inbox.Key{Consumer: "orders", MessageID: id}, func(ctx context.Context) error {
		tx, _ := inbox.TxFromContext[*sql.Tx](ctx)
		_, err := tx.ExecContext(ctx, "INSERT INTO "+t.effects+" (id) VALUES ('"+id+"')")
		return err
	})
}

// deadlocks returns how many deadlocks the server has seen.
func (t *table) deadlocks(tb testing.TB) int {
	tb.Helper()
	var (
		n    int
		name string
		err  error
	)
	switch t.dialect {
	case sqlstore.PostgreSQL:
		err = t.db.QueryRowContext(tb.Context(),
			"SELECT deadlocks FROM pg_stat_database WHERE datname = current_database()").Scan(&n)
	case sqlstore.MySQL:
		err = t.db.QueryRowContext(tb.Context(), "SHOW GLOBAL STATUS LIKE 'Innodb_deadlocks'").Scan(&name, &n)
	}
	if err != nil {
		tb.Fatal(err)
	}
	return n
}
