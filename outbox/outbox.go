// Package outbox publishes messages from inside a transaction: it writes them to a table, in the transaction of the
// handler, and a [Relay] publishes them to the broker after the commit. Use it with [inbox.OutputsOutbox], or for
// handlers that publish to several topics, or where the broker gives up redelivering.
//
// The table is one of watermill-sql's queue schema, and its payloads are the envelopes of Watermill's forwarder.
// PostgreSQL, MySQL (8 or later) and MariaDB (10.6 or later) are supported, over pgx and database/sql.
package outbox

import (
	"context"
	stdsql "database/sql"
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	"github.com/ThreeDotsLabs/watermill-sql/v4/pkg/sql"

	"github.com/watermill-inbox/inbox/sqlstore"
)

// Config describes the outbox's table. The publishers and relays of one table share it.
type Config struct {
	// Dialect is the kind of database: PostgreSQL or MySQL (which includes MariaDB). Required. SQLite has no row locks
	// for a relay to work with; there, use inbox.OutputsReplay.
	Dialect sqlstore.Dialect

	// Topic names the table as watermill-sql does: watermill_<topic>. Letters, digits and the characters _ - . : $ are
	// allowed. Defaults to "inbox_outbox".
	Topic string
}

const defaultTopic = "inbox_outbox"

// validTopic is stricter than watermill-sql, which checks only when it publishes.
var validTopic = regexp.MustCompile(`^[A-Za-z0-9_.:$-]{1,50}$`)

func (c *Config) setDefaults() {
	if c.Topic == "" {
		c.Topic = defaultTopic
	}
}

// Validate reports every fault of the configuration, each naming its field.
func (c Config) Validate() error {
	var faults []error
	switch c.Dialect {
	case sqlstore.PostgreSQL, sqlstore.MySQL:
	case sqlstore.SQLite:
		faults = append(faults, errors.New("outbox: Config.Dialect: SQLite has no outbox: use inbox.OutputsReplay, which needs no relay"))
	default:
		faults = append(faults, fmt.Errorf("outbox: Config.Dialect is required: %v", c.Dialect))
	}
	if c.Topic != "" && !validTopic.MatchString(c.Topic) {
		faults = append(faults, fmt.Errorf("outbox: Config.Topic: %q is not a topic that can name a table", c.Topic))
	}
	return errors.Join(faults...)
}

// InitializeSchema creates the outbox's table unless it is there. Call it at start, as a transaction of its own: in a
// handler's transaction it would commit that on MySQL. Any number of processes may call it at the same time.
//
// db is [sql.BeginnerFromStdSQL] of a *sql.DB, or [sql.BeginnerFromPgx] of a pool.
func InitializeSchema(ctx context.Context, db sql.Beginner, config Config) error {
	if err := config.Validate(); err != nil {
		return err
	}
	config.setDefaults()
	if err := createTable(ctx, db, config.table()); err != nil {
		return fmt.Errorf("outbox: create table %s: %w", config.table().name, err)
	}
	return nil
}

func createTable(ctx context.Context, db sql.Beginner, t table) error {
	tx, err := db.BeginTx(ctx, &stdsql.TxOptions{Isolation: stdsql.LevelReadCommitted})
	if err != nil {
		return err
	}
	defer func() { _ = tx.Rollback() }()
	for _, statement := range t.create {
		if _, err := tx.ExecContext(ctx, statement); err != nil {
			return err
		}
	}
	return tx.Commit()
}

// table is the SQL of the outbox's table in one dialect.
type table struct {
	name   string
	create []string
	claim  string // parameters: the offset to begin behind, how many messages
	delete func(offsets []int64) string
	insert func(messages int) string
}

func (c Config) table() table {
	if c.Dialect == sqlstore.MySQL {
		return mySQLTable("`watermill_" + c.Topic + "`")
	}
	return postgreSQLTable(`"watermill_` + c.Topic + `"`)
}

func postgreSQLTable(name string) table {
	return table{
		name: name,
		create: []string{
			// CREATE TABLE IF NOT EXISTS alone fails when two sessions run it at the same time.
			`SELECT pg_advisory_xact_lock(hashtext('inbox outbox schema'))`,
			// As watermill-sql's, but with an offset that does not run out after 2³¹ messages.
			`CREATE TABLE IF NOT EXISTS ` + name + ` (
				"offset"     BIGSERIAL PRIMARY KEY,
				"uuid"       VARCHAR(36) NOT NULL,
				"payload"    BYTEA DEFAULT NULL,
				"metadata"   JSON DEFAULT NULL,
				"acked"      BOOLEAN NOT NULL DEFAULT FALSE,
				"created_at" TIMESTAMP WITH TIME ZONE NOT NULL DEFAULT CURRENT_TIMESTAMP
			)`,
		},
		claim: `
			SELECT "offset", payload
			FROM ` + name + `
			WHERE acked = FALSE AND "offset" > $1
			ORDER BY "offset"
			LIMIT $2
			FOR UPDATE SKIP LOCKED`,
		delete: func(offsets []int64) string {
			return `DELETE FROM ` + name + ` WHERE "offset" IN (` + list(offsets, ", ") + `)`
		},
		insert: func(messages int) string {
			var values strings.Builder
			for i := range messages {
				fmt.Fprintf(&values, ", ($%d, $%d)", 2*i+1, 2*i+2)
			}
			return `INSERT INTO ` + name + ` (uuid, payload) VALUES ` + values.String()[2:]
		},
	}
}

func mySQLTable(name string) table {
	return table{
		name: name,
		create: []string{
			`CREATE TABLE IF NOT EXISTS ` + name + ` (
				` + "`offset`" + `     BIGINT NOT NULL AUTO_INCREMENT PRIMARY KEY,
				` + "`uuid`" + `       VARCHAR(36) NOT NULL,
				` + "`payload`" + `    LONGBLOB DEFAULT NULL,
				` + "`metadata`" + `   JSON DEFAULT NULL,
				` + "`acked`" + `      BOOLEAN NOT NULL DEFAULT FALSE,
				` + "`created_at`" + ` TIMESTAMP NOT NULL DEFAULT CURRENT_TIMESTAMP
			) ENGINE = InnoDB`,
		},
		claim: `
			SELECT ` + "`offset`" + `, payload
			FROM ` + name + `
			WHERE acked = FALSE AND ` + "`offset`" + ` > ?
			ORDER BY ` + "`offset`" + `
			LIMIT ?
			FOR UPDATE SKIP LOCKED`,
		// A plain IN lets the optimizer scan a small table, over rows that other relays locked: a deadlock.
		delete: func(offsets []int64) string {
			return `
				DELETE message
				FROM (SELECT ` + list(offsets, " AS id UNION ALL SELECT ") + ` AS id) AS published
				STRAIGHT_JOIN ` + name + ` AS message ON message.` + "`offset`" + ` = published.id`
		},
		insert: func(messages int) string {
			return `INSERT INTO ` + name + ` (uuid, payload) VALUES ` + strings.Repeat(", (?, ?)", messages)[2:]
		},
	}
}

func list(offsets []int64, separator string) string {
	text := make([]byte, 0, (8+len(separator))*len(offsets))
	for i, offset := range offsets {
		if i > 0 {
			text = append(text, separator...)
		}
		text = strconv.AppendInt(text, offset, 10)
	}
	return string(text)
}
