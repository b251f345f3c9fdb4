package sqlstore

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"runtime"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

// maxBegins bounds how often Begin starts over, which it does when it found something gone: the row that kept it from
// claiming the key, a prepared statement, or the connection that the pool gave it, as after a restart of the server.
const maxBegins = 5

// cleanupTimeout bounds what has to be done after the caller's context may have ended.
const cleanupTimeout = 5 * time.Second

// cancelTimeout is how long a server may take to cancel a statement before its connection is given up.
const cancelTimeout = 2 * time.Second

var (
	_ inbox.Tx           = (*Tx)(nil)
	_ inbox.LossDetector = (*Tx)(nil)
)

// Tx is an [inbox.Tx] over a *sql.Tx.
type Tx struct {
	store  *Store
	key    inbox.Key
	record *inbox.Record
	began  time.Time

	// The transaction has a connection of its own, so that waiting for one ends with the context of Begin, and so that the
	// connection is at hand when it has to be inspected or thrown away. Its context is not the caller's: the transaction
	// outlives Begin, and database/sql would roll it back in the middle of a commit.
	conn   *sql.Conn
	tx     *sql.Tx
	cancel context.CancelFunc
	libPQ  driver.Conn // nil: another driver
	ended  bool
	lost   bool // the connection
}

// Begin implements [inbox.Store]. Waiting for a connection of the pool ends with ctx.
func (s *Store) Begin(ctx context.Context, claim inbox.Claim) (inbox.Tx, error) {
	var err error
	for range maxBegins {
		var tx *Tx
		if tx, err = s.begin(ctx, claim); err == nil {
			return tx, nil
		}
		switch {
		case ctx.Err() != nil:
			return nil, err
		case errors.Is(err, dialect.ErrRowGone), errors.Is(err, errConnectionGone):
		case s.database.classify(err) == dialect.StaleStatement:
			if s.prepared != nil {
				s.prepared.forget()
			}
		default:
			return nil, err
		}
	}
	return nil, err
}

var errConnectionGone = errors.New("the connection is lost")

// begin returns a transaction that owns the claim, or one that is over and has a record.
func (s *Store) begin(ctx context.Context, claim inbox.Claim) (_ *Tx, err error) {
	statement, err := s.database.claimStatement(ctx, s, claim)
	if err == nil && s.prepared != nil {
		err = s.prepared.prepare(ctx, statement.query, s.statements.Record, s.statements.Seal, s.statements.SealOutputs)
	}
	if err != nil {
		return nil, s.wrapPool(ctx, "prepare claim", err)
	}
	conn, err := s.db.Conn(ctx)
	if err != nil {
		return nil, s.wrapPool(ctx, "begin transaction", err)
	}
	txCtx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	t := &Tx{store: s, key: claim.Key, began: time.Now(), conn: conn, cancel: cancel}
	t.libPQ = libPQConn(conn)
	detach := t.endWith(ctx)
	defer detach()
	if t.tx, err = conn.BeginTx(txCtx, &s.config.TxOptions); err != nil {
		_ = t.release(ctx, err)
		return nil, s.wrap(ctx, "begin transaction", t.markLost(err))
	}

	claimed, err := t.claim(ctx, statement)
	if err == nil && !claimed {
		t.record, err = t.selectRecord(ctx)
	}
	if err == nil && claimed && !detach() {
		err = ctx.Err() // its end undoes the transaction at this moment
	}
	if err != nil || !claimed {
		// A record that was found is proof enough, whatever becomes of the transaction that found it.
		_ = t.abandon(ctx)
	}
	switch {
	case errors.Is(err, inbox.ErrInFlight):
		return nil, err
	case errors.Is(err, dialect.ErrUnsealed):
		return nil, fmt.Errorf("inbox: claim key: consumer %q, message %q: %w", claim.Key.Consumer, claim.Key.MessageID, err)
	case err != nil:
		return nil, s.wrap(ctx, "claim key", t.markLost(err))
	case claimed:
		s.mu.Lock()
		s.live[t.tx] = struct{}{}
		s.mu.Unlock()
	}
	return t, nil
}

// markLost says that the connection was lost, if it was, with everything that was done on it.
func (t *Tx) markLost(err error) error {
	if t.lost {
		return fmt.Errorf("%w: %w", errConnectionGone, err)
	}
	return err
}

// wrapPool wraps an error that a wait for a connection may have ended in.
func (s *Store) wrapPool(ctx context.Context, doing string, err error) error {
	if stats := s.db.Stats(); ctx.Err() != nil && stats.MaxOpenConnections > 0 && stats.InUse >= stats.MaxOpenConnections {
		return dialect.Wrap(ctx, doing, err, dialect.HintPool)
	}
	return s.wrap(ctx, doing, err)
}

// claim runs the claim, and reports whether the key is ours: if not, a row was in the way.
func (t *Tx) claim(ctx context.Context, statement claimStatement) (bool, error) {
	claimCtx := ctx
	if statement.timeout > 0 {
		var cancel context.CancelFunc
		claimCtx, cancel = context.WithTimeout(ctx, statement.timeout)
		defer cancel()
	}
	result, err := t.exec(claimCtx, statement.query, statement.args...)
	if err == nil {
		rows, err := result.RowsAffected()
		return rows == 1, err
	}
	switch class := t.store.database.classify(err); {
	case class == dialect.UniqueViolation && t.store.config.Dialect == MySQL:
		return false, nil
	case class == dialect.LockTimeout, claimCtx.Err() != nil && ctx.Err() == nil:
		return false, fmt.Errorf("%w: %w", inbox.ErrInFlight, err)
	}
	return false, err
}

func (t *Tx) selectRecord(ctx context.Context) (*inbox.Record, error) {
	var (
		receivedAt           int64
		processedAt          *int64
		fingerprint, outputs []byte
	)
	err := t.queryRow(ctx, t.store.statements.Record, t.key.Consumer, t.key.MessageID).
		Scan(&receivedAt, &processedAt, &fingerprint, &outputs)
	if errors.Is(err, sql.ErrNoRows) {
		return nil, dialect.ErrRowGone
	}
	if err != nil {
		return nil, err
	}
	return dialect.NewRecord(receivedAt, processedAt, fingerprint, outputs)
}

func (t *Tx) exec(ctx context.Context, query string, args ...any) (sql.Result, error) {
	if stmt := t.prepared(query); stmt != nil {
		return t.tx.StmtContext(ctx, stmt).ExecContext(ctx, args...) //nolint:sqlclosecheck // ends with the transaction
	}
	return t.tx.ExecContext(ctx, query, args...)
}

func (t *Tx) queryRow(ctx context.Context, query string, args ...any) *sql.Row {
	if stmt := t.prepared(query); stmt != nil {
		return t.tx.StmtContext(ctx, stmt).QueryRowContext(ctx, args...) //nolint:sqlclosecheck // ends with the transaction
	}
	return t.tx.QueryRowContext(ctx, query, args...)
}

func (t *Tx) prepared(query string) *sql.Stmt {
	if t.store.prepared == nil {
		return nil
	}
	return t.store.prepared.get(query)
}

// Recorded implements [inbox.Tx].
func (t *Tx) Recorded() *inbox.Record { return t.record }

// Native implements [inbox.Tx]. It returns a *sql.Tx.
func (t *Tx) Native() any { return t.tx }

// Commit implements [inbox.Tx]. On PostgreSQL and SQLite ctx bounds all of it. On MySQL it does not bound the COMMIT
// itself, which the driver waits for as long as the readTimeout of its DSN allows.
func (t *Tx) Commit(ctx context.Context, outputs []*message.Message) error {
	if t.ended {
		return errors.New("inbox: commit: the transaction is over")
	}
	stop := t.endWith(ctx)
	if err := t.seal(ctx, outputs); err != nil {
		stop()
		if t.store.prepared != nil && t.store.database.classify(err) == dialect.StaleStatement {
			t.store.prepared.forget()
		}
		_ = t.abandon(ctx)
		if errors.Is(err, driver.ErrBadConn) && ctx.Err() == nil { // what drivers say while they have rows to read
			return dialect.Wrap(ctx, "seal record", err, "the connection is lost, or "+dialect.HintBusy)
		}
		return dialect.Wrap(ctx, "seal record", err, t.store.commitHint(err))
	}
	err := t.tx.Commit()
	stop()
	_ = t.release(ctx, err)
	if err != nil {
		return t.wrapCommit(ctx, err)
	}
	return nil
}

// seal records the outputs, and proves that the transaction still is the one that made the claim.
func (t *Tx) seal(ctx context.Context, outputs []*message.Message) error {
	query, args := t.store.statements.Seal, []any{t.key.Consumer, t.key.MessageID}
	if len(outputs) > 0 {
		query = t.store.statements.SealOutputs
		args = []any{dialect.EncodeMessages(outputs), t.key.Consumer, t.key.MessageID}
	} else if must, err := t.store.database.mustSeal(t); err != nil || !must {
		return errors.Join(err, ctx.Err())
	}
	result, err := t.exec(ctx, query, args...)
	if err != nil {
		if errors.Is(err, sql.ErrTxDone) && ctx.Err() == nil {
			return fmt.Errorf("%w: %w", dialect.ErrClaimLost, err)
		}
		return err
	}
	rows, err := result.RowsAffected()
	if err != nil {
		return err
	}
	if rows != 1 {
		return dialect.ErrClaimLost
	}
	return nil
}

func (t *Tx) wrapCommit(ctx context.Context, err error) error {
	switch {
	case ctx.Err() != nil:
		return t.store.wrap(ctx, "commit", err)
	case errors.Is(err, sql.ErrTxDone):
		return dialect.Wrap(ctx, "commit", err, dialect.HintEnded)
	}
	return dialect.Wrap(ctx, "commit", err, t.store.commitHint(err))
}

// commitHint returns what usually lies behind an error from the seal or the COMMIT, or "".
func (s *Store) commitHint(err error) string {
	if s.config.Dialect == SQLite && dialect.IsNoTransaction(err) {
		return dialect.HintEnded
	}
	return dialect.CommitHint(s.database.classify(err), err)
}

// ConnectionLost implements [inbox.LossDetector].
func (t *Tx) ConnectionLost() bool { return t.lost }

// Rollback implements [inbox.Tx]. A connection that is lost, or that cannot be brought out of its transaction, is closed,
// which undoes the transaction as well.
func (t *Tx) Rollback(ctx context.Context) error {
	if t.ended {
		return nil
	}
	stop := t.endWith(ctx)
	err := t.tx.Rollback()
	stop()
	if unclean := t.release(ctx, err); unclean != nil && !t.lost {
		return dialect.Wrap(ctx, "roll back", errors.Join(err, unclean), "")
	}
	return nil
}

// endWith ends the transaction, and a statement that runs in it, when ctx ends. The function that it returns calls that off,
// and reports whether it came in time.
func (t *Tx) endWith(ctx context.Context) func() bool {
	if t.libPQ == nil {
		return context.AfterFunc(ctx, t.cancel)
	}
	// lib/pq asks the server, over another connection, to cancel the statement, and goes on reading. If the server cannot be
	// reached any more, only closing the connection ends that, which may be done at any time.
	over, callOff := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		t.cancel()
		timer := time.NewTimer(cancelTimeout)
		defer timer.Stop()
		select {
		case <-timer.C:
			_ = t.libPQ.Close()
		case <-over.Done():
		}
	})
	return func() bool {
		callOff()
		return stop()
	}
}

// libPQConn returns the connection below conn if it is one of lib/pq.
func libPQConn(conn *sql.Conn) driver.Conn {
	var found driver.Conn
	_ = conn.Raw(func(driverConn any) error {
		if pq, ok := unwrap(driverConn).(driver.Conn); ok && dialect.PackagePath(pq) == "github.com/lib/pq" {
			found = pq
		}
		return nil
	})
	return found
}

// abandon rolls back, also when the caller's context ended.
func (t *Tx) abandon(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), cleanupTimeout)
	defer cancel()
	return t.Rollback(ctx)
}

// release gives the connection back to the pool after the transaction ended in err. If it may still be in a transaction
// and cannot be brought out of it, it is closed instead, and release says why.
func (t *Tx) release(ctx context.Context, err error) error {
	t.ended = true
	t.store.mu.Lock()
	delete(t.store.live, t.tx)
	t.store.mu.Unlock()
	defer func() {
		t.cancel()
		_ = t.conn.Close()
	}()
	if err == nil {
		return nil
	}
	if t.store.config.Dialect == SQLite {
		ctx = context.WithoutCancel(ctx) // it waits for nobody, and closing the connection may drop an in-memory database
	}
	err = t.onConn(func(conn *sql.Conn) error {
		_, err := conn.ExecContext(ctx, "ROLLBACK")
		return err
	})
	if t.store.config.Dialect == SQLite && dialect.IsNoTransaction(err) {
		return nil
	}
	if err == nil {
		return nil
	}
	t.lost = ctx.Err() == nil && isConnectionLost(err)
	_ = t.onConn(func(conn *sql.Conn) error {
		return conn.Raw(func(any) error { return driver.ErrBadConn })
	})
	return err
}

// onConn runs fn, which begins something on the connection. When a context ends, database/sql rolls back on a goroutine of
// its own, and closes the connection if that fails. A method of sql.Conn that begins at this very moment finds the
// connection neither open nor closed, and panics with a nil pointer; that is sql.ErrConnDone, as a moment later.
func (t *Tx) onConn(fn func(conn *sql.Conn) error) (err error) {
	defer func() {
		value := recover()
		if value == nil {
			return
		}
		if _, ok := value.(runtime.Error); !ok || !errors.Is(t.conn.Close(), sql.ErrConnDone) {
			panic(value)
		}
		err = sql.ErrConnDone
	}()
	return fn(t.conn)
}

// isConnectionLost reports whether a statement without a context that ended failed because the connection was closed
// before it. lib/pq goes on saying why it was.
func isConnectionLost(err error) bool {
	return errors.Is(err, driver.ErrBadConn) || errors.Is(err, sql.ErrConnDone) ||
		errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// nullable returns NULL for nil, whatever the driver makes of a nil slice.
func nullable(b []byte) any {
	if b == nil {
		return nil
	}
	return b
}

// claimArgs returns fingerprint, payload and metadata of a claim.
func claimArgs(claim inbox.Claim) (fingerprint, payload, metadata any) {
	if claim.Message != nil {
		payload, metadata = []byte(claim.Message.Payload), dialect.EncodeMetadata(claim.Message.Metadata)
		if claim.Message.Payload == nil {
			payload = []byte{} // NULL is for payloads that were not stored
		}
	}
	return nullable(claim.Fingerprint), payload, metadata
}
