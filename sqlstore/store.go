// Package sqlstore keeps the inbox in a PostgreSQL, MySQL, MariaDB or SQLite table, over database/sql.
//
// Handlers get the transaction as a *sql.Tx from inbox.TxFromContext, or as whatever they are in from [Store.Executor].
//
// # PostgreSQL
//
// A claim waits for another transaction's claim of the same message in the database, for as long as the inbox allows,
// and without touching the session's lock_timeout. A host that vanishes keeps its claims until its connection is found
// to be dead: set tcp_keepalives_idle and idle_in_transaction_session_timeout.
//
// The record is looked for again when the handler returned. A handler that changes the search_path or the role sets it back,
// or Table is qualified and the role may write to it.
//
// # MySQL and MariaDB
//
// The driver's COMMIT and ROLLBACK take no context. What bounds them is readTimeout in its DSN, which [Store.CheckSchema]
// asks for; keep it above the slowest statement. MariaDB counts a claim's wait in whole seconds. MySQL has no such limit
// for one statement: there a claim that waited too long costs its connection, and one that the server did not answer in
// time is taken for one that waited.
//
// [Store.DeleteExpired] runs at READ COMMITTED, which with a binary log needs binlog_format ROW or MIXED.
//
// Statements such as CREATE TABLE commit the transaction that they run in. A handler that runs one leaves a record
// without its seal behind; what is not sealed is neither skipped nor processed again, but an error that says so, until
// [Store.Forget] deletes it.
//
// # SQLite
//
// Use WAL and a busy_timeout, which [Store.CheckSchema] asks for: "file:inbox.db?_pragma=journal_mode(WAL)&
// _pragma=busy_timeout(5000)". With [sql.DB.SetMaxOpenConns] of 1, a handler must use its transaction and not the
// database, whose only connection the transaction has.
package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"regexp"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/internal/txctx"
	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

var (
	_ inbox.Store               = (*Store)(nil)
	_ inbox.TransientClassifier = (*Store)(nil)
	_ inbox.ErrorExplainer      = (*Store)(nil)
	_ inbox.OutputsMarker       = (*Store)(nil)
)

// Store is an [inbox.Store] over database/sql. It is safe for concurrent use. Several stores, in any number of processes,
// may share a table.
type Store struct {
	db         *sql.DB
	config     Config
	database   database
	table      dialect.Table
	statements *dialect.Statements
	prepared   *preparedStatements // nil: statements are not prepared
	server     atomic.Pointer[serverVersion]
	expired    dialect.ExpiredCursor

	mu   sync.Mutex
	live map[*sql.Tx]struct{} // transactions that handlers have
}

// database is what differs by dialect, beyond the text of statements.
type database interface {
	statements(dialect.Table) *dialect.Statements
	classify(error) dialect.Class

	// claimStatement returns what claims the key. It may have to ask the database, and does so through the pool.
	claimStatement(context.Context, *Store, inbox.Claim) (claimStatement, error)

	// mustSeal reports whether a transaction without outputs needs the seal to prove that it still owns its claim. An
	// error says that it is known not to.
	mustSeal(*Tx) (bool, error)

	// createSchema runs the statements of the DDL, each of which does nothing if it was run before.
	createSchema(ctx context.Context, s *Store, statements []string) error

	// tableFaults and settingFaults say what is wrong with the table, and with the database around it.
	tableFaults(context.Context, *Store) ([]string, error)
	settingFaults(context.Context, *Store) ([]string, error)

	// deleteExpired takes the age in microseconds.
	deleteExpired(ctx context.Context, s *Store, age int64, limit int) (int, error)
}

// claimStatement is a claim, ready to be run.
type claimStatement struct {
	query string
	args  []any

	// timeout bounds the wait for another transaction's claim where the statement does not do so itself.
	timeout time.Duration
}

// New returns a store. It opens no connection: the table has to be there when the first message arrives, see
// [Store.InitializeSchema] and [Migrations].
func New(db *sql.DB, config Config) (*Store, error) {
	if db == nil {
		return nil, errors.New("inbox: the database is nil")
	}
	config.setDefaults()
	if err := config.Validate(); err != nil {
		return nil, err
	}
	table, err := dialect.ParseTable(config.Table)
	if err != nil {
		return nil, err
	}
	s := &Store{db: db, config: config, table: table, live: make(map[*sql.Tx]struct{})}
	switch config.Dialect {
	case PostgreSQL:
		s.database = postgreSQL{}
	case MySQL:
		s.database = mySQL{}
	case SQLite:
		s.database = sqlite{}
	}
	s.statements = s.database.statements(table)
	if !config.DisablePreparedStatements && !isPgx(db) {
		s.prepared = newPreparedStatements(db)
	}
	return s, nil
}

// isPgx reports whether db's driver is pgx, which caches statements itself, in a way that its user configured.
func isPgx(db *sql.DB) bool {
	return strings.HasPrefix(dialect.PackagePath(db.Driver()), "github.com/jackc/pgx/")
}

// unwrap returns the driver's own connection, below a [Guard] or anything else that can be unwrapped.
func unwrap(driverConn any) any {
	for {
		wrapper, ok := driverConn.(interface{ Unwrap() driver.Conn })
		if !ok {
			return driverConn
		}
		driverConn = wrapper.Unwrap()
	}
}

// Executor is what *sql.DB, *sql.Conn and *sql.Tx have in common, and what code generated by sqlc asks for.
type Executor interface {
	ExecContext(ctx context.Context, query string, args ...any) (sql.Result, error)
	QueryContext(ctx context.Context, query string, args ...any) (*sql.Rows, error)
	QueryRowContext(ctx context.Context, query string, args ...any) *sql.Row
	PrepareContext(ctx context.Context, query string) (*sql.Stmt, error)
}

// Executor returns this store's transaction if ctx carries one, as in a handler, and the database otherwise. So a
// repository that runs its statements on it works inside and outside of handlers. In a goroutine that a handler left
// behind it is the transaction still, which returns [sql.ErrTxDone]: what the handler began does not go on without it.
func (s *Store) Executor(ctx context.Context) Executor {
	frame := txctx.Find(ctx, func(frame *txctx.Frame) bool {
		tx, ok := frame.Native.(*sql.Tx)
		if !ok {
			return false
		}
		if store, ok := frame.Store.(*Store); ok {
			return store == s
		}
		// Another type of store may wrap this one, and knows its transactions as long as they live.
		return s.isLive(tx) || frame.Ended()
	})
	if frame == nil {
		return s.db
	}
	return frame.Native.(*sql.Tx)
}

func (s *Store) isLive(tx *sql.Tx) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	_, ok := s.live[tx]
	return ok
}

// Forget deletes the record of a key, so that its next delivery is processed as if it were the first, and drops outputs
// that wait to be published. A key without a record is no error. The key is as its message has it or, if no record is found
// by that, in its stored form.
//
// Forget no key whose message is being delivered: a process that has published its outputs, but not yet marked them, may
// take those of the next delivery for the ones that it published.
func (s *Store) Forget(ctx context.Context, key inbox.Key) error {
	normalized, err := key.Normalize()
	if err != nil {
		return err
	}
	err = s.inTx(ctx, func(tx *sql.Tx) error {
		for _, consumer := range storedForms(key.Consumer, normalized.Consumer) {
			for _, id := range storedForms(key.MessageID, normalized.MessageID) {
				result, err := tx.ExecContext(ctx, s.statements.Forget, consumer, id)
				if err != nil {
					return err
				}
				if rows, err := result.RowsAffected(); err != nil || rows > 0 {
					return err
				}
			}
		}
		return nil
	})
	if err != nil {
		return s.wrap(ctx, "forget key", err)
	}
	return nil
}

// storedForms returns how a part of a key may be stored: normalized, or as it is if it is the stored form already.
func storedForms(part, normalized string) []string {
	if hashed.MatchString(part) {
		return []string{normalized, part}
	}
	return []string{normalized}
}

var hashed = regexp.MustCompile("^sha256:[0-9a-f]{64}$")

// IsTransient implements [inbox.TransientClassifier], by the codes of the database's errors.
func (s *Store) IsTransient(err error) bool {
	if errors.Is(err, inbox.ErrInFlight) {
		return false
	}
	class := s.database.classify(err)
	return class == dialect.Transient || class == dialect.LockTimeout && s.config.Dialect == MySQL
}

// ExplainError implements [inbox.ErrorExplainer].
func (s *Store) ExplainError(err error) string {
	stats := s.db.Stats()
	exhausted := stats.MaxOpenConnections > 0 && stats.InUse >= stats.MaxOpenConnections
	return dialect.HandlerHint(s.database.classify(err), err, exhausted)
}

// wrap says what was being done when err happened. If the context ended, the result is its error as well, which drivers
// do not always say.
func (s *Store) wrap(ctx context.Context, doing string, err error) error {
	class := s.database.classify(err)
	hint := dialect.Hint(class, err)
	if class == dialect.Schema {
		hint = dialect.HintSchema
	}
	return dialect.Wrap(ctx, doing, err, hint)
}
