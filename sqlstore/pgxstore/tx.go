package pgxstore

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

// maxBegins bounds how often Begin starts over, which it does when it found something gone: the row that kept it from
// claiming the key, a prepared statement, the connection.
const maxBegins = 5

// rollbackTimeout bounds the rollback after an error, when the caller's context may have ended.
const rollbackTimeout = 5 * time.Second

// The states of a session as the server reports them.
const (
	sessionIdle    = 'I'
	sessionAborted = 'E'
)

var (
	_ inbox.Tx           = (*Tx)(nil)
	_ inbox.LossDetector = (*Tx)(nil)
)

// Tx is an [inbox.Tx] over a pgx.Tx.
type Tx struct {
	store  *Store
	key    inbox.Key
	began  time.Time
	record *inbox.Record

	conn  *pgxpool.Conn
	tx    pgx.Tx // pgx's own
	lease *lease // what the handler has of it
	ended bool
	lost  bool // the connection
}

// Begin implements [inbox.Store]. Waiting for a connection of the pool ends with ctx.
func (s *Store) Begin(ctx context.Context, claim inbox.Claim) (inbox.Tx, error) {
	var err error
	for range maxBegins {
		var again bool
		var tx *Tx
		if tx, again, err = s.begin(ctx, claim); err == nil {
			return tx, nil
		}
		if !again || ctx.Err() != nil {
			break
		}
	}
	return nil, err
}

// begin returns a transaction that owns the claim, or one that is over and has a record. After an error, again tells
// whether it may go better at once.
func (s *Store) begin(ctx context.Context, claim inbox.Claim) (_ *Tx, again bool, err error) {
	conn, err := s.pool.Acquire(ctx)
	if err != nil {
		hint := ""
		if stat := s.pool.Stat(); ctx.Err() != nil && stat.AcquiredConns() >= stat.MaxConns() {
			hint = dialect.HintPool
		}
		return nil, false, dialect.Wrap(ctx, "begin transaction", err, hint)
	}
	t := &Tx{store: s, key: claim.Key, began: time.Now(), conn: conn}
	claimed, err := t.claim(ctx, claim)
	if err == nil && claimed {
		t.lease = newLease(s, t.tx)
		return t, false, nil
	}
	if err == nil {
		t.record, err = t.takeRecord(ctx)
	}
	class := dialect.ClassifyPostgreSQL(err)
	again = errors.Is(err, dialect.ErrRowGone) || class == dialect.StaleStatement || t.isClosed()
	t.abandon() //nolint:contextcheck // ctx may have ended
	switch {
	case err == nil:
		return t, false, nil
	case class == dialect.LockTimeout:
		return nil, false, fmt.Errorf("%w: %w", inbox.ErrInFlight, err)
	case errors.Is(err, dialect.ErrUnsealed):
		return nil, false, fmt.Errorf("inbox: claim key: consumer %q, message %q: %w", claim.Key.Consumer, claim.Key.MessageID, err)
	case class == dialect.Schema:
		return nil, false, dialect.Wrap(ctx, "claim key", err, dialect.HintSchema)
	}
	return nil, again, dialect.Wrap(ctx, "claim key", err, "")
}

// claim begins the transaction and runs the claim, in one round trip. It reports whether the key is ours: if not, a row
// was in the way.
func (t *Tx) claim(ctx context.Context, claim inbox.Claim) (bool, error) {
	var payload, metadata []byte
	if claim.Message != nil {
		payload, metadata = claim.Message.Payload, dialect.EncodeMetadata(claim.Message.Metadata)
		if payload == nil {
			payload = []byte{} // NULL is for payloads that were not stored
		}
	}
	batch := &pgx.Batch{}
	batch.BeginTx(t.store.config.TxOptions)
	batch.Queue(t.store.statements.Claim, claim.Key.Consumer, claim.Key.MessageID, dialect.LockTimeoutParam(claim.LockTimeout),
		claim.Fingerprint, payload, metadata)
	results := t.conn.Conn().SendBatch(ctx, batch)
	t.tx = results.Tx()
	_, err := results.Exec()
	var tag pgconn.CommandTag
	if err == nil {
		tag, err = results.Exec()
	}
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	return tag.RowsAffected() == 1, err
}

// takeRecord reads the row that is in the way of the claim and ends the transaction, in one round trip.
func (t *Tx) takeRecord(ctx context.Context) (*inbox.Record, error) {
	batch := &pgx.Batch{}
	batch.Queue(t.store.statements.Record, t.key.Consumer, t.key.MessageID)
	batch.Queue("rollback")
	results := t.conn.Conn().SendBatch(ctx, batch)
	var (
		receivedAt           int64
		processedAt          *int64
		fingerprint, outputs []byte
	)
	err := results.QueryRow().Scan(&receivedAt, &processedAt, &fingerprint, &outputs)
	// A record that was read is proof enough, whatever becomes of the transaction that read it.
	_ = results.Close()
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, dialect.ErrRowGone
	case err != nil:
		return nil, err
	}
	return dialect.NewRecord(receivedAt, processedAt, fingerprint, outputs)
}

// Recorded implements [inbox.Tx].
func (t *Tx) Recorded() *inbox.Record { return t.record }

// Native implements [inbox.Tx]. It returns a pgx.Tx.
func (t *Tx) Native() any {
	if t.lease == nil {
		return nil
	}
	return t.lease.tx
}

// Commit implements [inbox.Tx]. The context bounds all of it. Outputs travel with the COMMIT, in one round trip.
func (t *Tx) Commit(ctx context.Context, outputs []*message.Message) error {
	if t.ended {
		return errors.New("inbox: commit: the transaction is over")
	}
	if !t.lease.end(ctx, t.conn) {
		t.ended, t.lost = true, true
		return dialect.Wrap(ctx, "commit", errors.New("the handler's goroutine uses the transaction still"), "")
	}
	err := t.state()
	switch {
	case err != nil:
	case len(outputs) > 0:
		err = t.commitWith(ctx, t.store.sealOutput, dialect.EncodeMessages(outputs), t.key.Consumer, t.key.MessageID)
	case time.Since(t.began) > dialect.SealAfter:
		err = t.commitWith(ctx, t.store.seal, t.key.Consumer, t.key.MessageID)
	default:
		err = t.tx.Commit(ctx)
	}
	if err != nil {
		t.abandon() //nolint:contextcheck // ctx may have ended
		return dialect.Wrap(ctx, "commit", err, dialect.CommitHint(dialect.ClassifyPostgreSQL(err), err))
	}
	t.release()
	return nil
}

// state says why the transaction cannot be committed. PostgreSQL loses no transaction silently, but a handler can end it
// with a raw ROLLBACK, and COMMIT without a transaction is no error.
func (t *Tx) state() error {
	session := t.conn.Conn().PgConn()
	switch {
	case session.IsClosed():
		return errors.New("the connection is lost, and the transaction with it: a context that ends during a query closes it")
	case session.IsBusy():
		return errors.New("conn busy")
	case session.TxStatus() == sessionIdle:
		return dialect.ErrClaimLost
	case session.TxStatus() == sessionAborted:
		return dialect.ErrAborted
	}
	return nil
}

// divisionByZero is how exactlyOne fails.
const divisionByZero = "22012"

// exactlyOne makes an UPDATE fail that does not change one row, so that a COMMIT right behind it in the pipeline does not
// take place.
func exactlyOne(update string) string {
	return "WITH sealed AS (" + update + "\nRETURNING 1)\nSELECT 1 / count(*) FROM sealed"
}

// commitWith seals the record and commits, in one round trip.
func (t *Tx) commitWith(ctx context.Context, seal string, args ...any) error {
	if t.lease.large { // which end with pgx's own transaction, and that with its own Commit
		if _, err := t.tx.Exec(ctx, seal, args...); err != nil {
			return claimLost(err)
		}
		return t.tx.Commit(ctx)
	}
	batch := &pgx.Batch{}
	batch.Queue(seal, args...)
	batch.Queue("commit")
	results := t.conn.Conn().SendBatch(ctx, batch)
	_, err := results.Exec()
	var tag pgconn.CommandTag
	if err == nil {
		tag, err = results.Exec()
	}
	if closeErr := results.Close(); err == nil {
		err = closeErr
	}
	if err == nil && tag.String() != "COMMIT" {
		return pgx.ErrTxCommitRollback
	}
	return claimLost(err)
}

// claimLost says what an error of exactlyOne means.
func claimLost(err error) error {
	var failed *pgconn.PgError
	if errors.As(err, &failed) && failed.Code == divisionByZero {
		return dialect.ErrClaimLost
	}
	return err
}

// ConnectionLost implements [inbox.LossDetector]. A context that ends during a query has pgx close the connection.
func (t *Tx) ConnectionLost() bool { return t.lost }

// Rollback implements [inbox.Tx]. A connection that is lost, or that cannot be brought out of its transaction, is closed,
// which undoes the transaction as well.
func (t *Tx) Rollback(ctx context.Context) error {
	if t.ended {
		return nil
	}
	if !t.lease.end(ctx, t.conn) {
		t.ended, t.lost = true, true
		return nil
	}
	if err := t.finish(ctx); err != nil {
		return dialect.Wrap(ctx, "roll back", err, "")
	}
	return nil
}

// abandon is finish for when the caller's context may have ended.
func (t *Tx) abandon() {
	ctx, cancel := context.WithTimeout(context.Background(), rollbackTimeout)
	defer cancel()
	_ = t.finish(ctx) // else the pool closes the connection
}

// finish ends the transaction, if it is open, and gives the connection back.
func (t *Tx) finish(ctx context.Context) error {
	defer t.release()
	session := t.conn.Conn().PgConn()
	over := session.TxStatus() == sessionIdle && (t.lease == nil || !t.lease.large)
	if session.IsClosed() || session.IsBusy() || over {
		return nil
	}
	if err := t.tx.Rollback(ctx); err != nil && !errors.Is(err, pgx.ErrTxClosed) {
		return err
	}
	return nil
}

func (t *Tx) isClosed() bool { return t.conn.Conn().IsClosed() }

// release gives the connection back to the pool, which closes it unless it is idle.
func (t *Tx) release() {
	t.ended, t.lost = true, t.isClosed()
	t.conn.Release()
}
