package sqlstore

import (
	"database/sql"
	"errors"
	"fmt"

	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

// Dialect is a kind of database. Its zero value is invalid.
type Dialect int

const (
	// PostgreSQL is PostgreSQL 12 and newer, through github.com/jackc/pgx/v5/stdlib or github.com/lib/pq.
	PostgreSQL Dialect = iota + 1

	// MySQL is MySQL 8 and newer, and MariaDB 10.5 and newer, through github.com/go-sql-driver/mysql.
	MySQL

	// SQLite is SQLite 3.24 and newer, through modernc.org/sqlite.
	SQLite
)

// String returns the dialect's name.
func (d Dialect) String() string {
	switch d {
	case PostgreSQL:
		return "PostgreSQL"
	case MySQL:
		return "MySQL"
	case SQLite:
		return "SQLite"
	}
	return fmt.Sprintf("Dialect(%d)", int(d))
}

// Config configures a [Store].
type Config struct {
	// Dialect is the kind of database. Required.
	Dialect Dialect

	// Table is the inbox table: "table" or "schema.table" of ASCII letters, digits and _. It is always quoted, so it keeps
	// its case. Defaults to "inbox".
	Table string

	// TxOptions are the options of the transactions that handlers run in. ReadOnly is refused. Defaults to the isolation
	// level READ COMMITTED on PostgreSQL, and to the server's own elsewhere; on MySQL another level costs a round trip
	// per message.
	TxOptions sql.TxOptions

	// DisablePreparedStatements sends every statement of the inbox unprepared. It is for drivers that prepare statements on
	// the server behind a pooler that spreads a session over connections, as PgBouncer does in transaction mode:
	// github.com/lib/pq, which needs binary_parameters=yes in its DSN there as well. Statements through pgx are never
	// prepared here: its default_query_exec_mode decides; but a driver that wraps pgx, as instrumentation does, is not
	// known to be pgx. Defaults to false: statements are prepared once per connection.
	DisablePreparedStatements bool
}

func (c *Config) setDefaults() {
	if c.Table == "" {
		c.Table = "inbox"
	}
	if c.Dialect == PostgreSQL && c.TxOptions.Isolation == sql.LevelDefault {
		c.TxOptions.Isolation = sql.LevelReadCommitted
	}
}

// Validate reports every fault of the configuration, each naming its field.
func (c Config) Validate() error {
	c.setDefaults()
	var faults []error
	if c.Dialect < PostgreSQL || c.Dialect > SQLite {
		faults = append(faults, fmt.Errorf("inbox: Config.Dialect must be PostgreSQL, MySQL or SQLite, not %s", c.Dialect))
	}
	if _, err := dialect.ParseTable(c.Table); err != nil {
		faults = append(faults, fmt.Errorf("inbox: Config.Table: %w", err))
	}
	if c.TxOptions.ReadOnly {
		faults = append(faults, errors.New("inbox: Config.TxOptions.ReadOnly: the claim is a write"))
	}
	return errors.Join(faults...)
}
