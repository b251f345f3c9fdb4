package pgxstore

import (
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/watermill-inbox/inbox/sqlstore"
)

// Config configures a [Store]. Its zero value is valid.
type Config struct {
	// Table is the inbox table: "table" or "schema.table" of ASCII letters, digits and _. It is always quoted, so it keeps
	// its case. Defaults to "inbox".
	Table string

	// TxOptions are the options of the transactions that handlers run in. ReadOnly is refused, and so are BeginQuery and
	// CommitQuery, since the store has to know what begins and ends its transaction. IsoLevel defaults to READ COMMITTED.
	TxOptions pgx.TxOptions
}

func (c *Config) setDefaults() {
	if c.Table == "" {
		c.Table = "inbox"
	}
	if c.TxOptions.IsoLevel == "" {
		c.TxOptions.IsoLevel = pgx.ReadCommitted
	}
}

// Validate reports every fault of the configuration, each naming its field.
func (c Config) Validate() error {
	faults := []error{sqlstore.Config{Dialect: sqlstore.PostgreSQL, Table: c.Table}.Validate()}
	switch c.TxOptions.IsoLevel {
	case "", pgx.ReadCommitted, pgx.RepeatableRead, pgx.Serializable, pgx.ReadUncommitted:
	default:
		faults = append(faults, fmt.Errorf("inbox: Config.TxOptions.IsoLevel: unknown level %q", c.TxOptions.IsoLevel))
	}
	if c.TxOptions.AccessMode == pgx.ReadOnly {
		faults = append(faults, errors.New("inbox: Config.TxOptions.AccessMode: the claim is a write"))
	}
	if c.TxOptions.BeginQuery != "" || c.TxOptions.CommitQuery != "" {
		faults = append(faults, errors.New("inbox: Config.TxOptions: BeginQuery and CommitQuery are not supported"))
	}
	return errors.Join(faults...)
}
