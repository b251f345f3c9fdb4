package pgxstore

import (
	"context"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"
)

// errNotYours is what a handler gets that wants to end the transaction.
var errNotYours = errors.New("inbox: the transaction belongs to the inbox: return nil from the handler to commit it, " +
	"or an error to roll it back")

// lease is the handler's use of a transaction. It ends before the transaction does, so that a goroutine that the handler
// left behind never reaches a connection that meanwhile serves another message.
type lease struct {
	store *Store
	tx    *handlerTx

	mu      sync.Mutex
	over    bool
	calls   int           // that are under way
	drained chan struct{} // closed when the last of them returned; nil as long as the lease is not over
	large   bool          // the handler has large objects, which only the end of pgx's own transaction ends
}

func newLease(store *Store, tx pgx.Tx) *lease {
	l := &lease{store: store}
	l.tx = &handlerTx{Tx: tx, lease: l}
	return l
}

// enter reports whether a call may go on to the transaction. If so, leave has to follow.
func (l *lease) enter() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over {
		return false
	}
	l.calls++
	return true
}

func (l *lease) leave() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.calls--; l.calls == 0 && l.drained != nil {
		close(l.drained)
	}
}

// end ends the lease. It waits for the calls that are under way. If ctx ends first, the connection is cut under them and
// taken out of the pool, since there is no telling when they return, and end reports false: conn is gone.
func (l *lease) end(ctx context.Context, conn *pgxpool.Conn) bool {
	l.mu.Lock()
	if l.over || l.calls == 0 {
		l.over = true
		l.mu.Unlock()
		return true
	}
	l.over, l.drained = true, make(chan struct{})
	l.mu.Unlock()

	select {
	case <-l.drained:
		return true
	case <-ctx.Done():
		_ = conn.Hijack().PgConn().Conn().Close()
		return false
	}
}

// handlerTx is the pgx.Tx that a handler gets: pgx's own, or a savepoint in it, for as long as the lease lasts. After
// that, every method returns pgx.ErrTxClosed, or nothing if it has no error to return.
type handlerTx struct {
	pgx.Tx    // embedded for the sake of methods that newer versions of pgx add
	lease     *lease
	savepoint bool
}

var _ pgx.Tx = (*handlerTx)(nil)

// Begin sets a savepoint, which Commit and Rollback of the returned pgx.Tx release or roll back to.
func (h *handlerTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if !h.lease.enter() {
		return nil, pgx.ErrTxClosed
	}
	defer h.lease.leave()
	tx, err := h.Tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &handlerTx{Tx: tx, lease: h.lease, savepoint: true}, nil
}

// Commit releases a savepoint. The transaction itself is committed by the inbox.
func (h *handlerTx) Commit(ctx context.Context) error {
	return h.finish(func() error { return h.Tx.Commit(ctx) })
}

// Rollback rolls back to a savepoint. The transaction itself is rolled back by the inbox.
func (h *handlerTx) Rollback(ctx context.Context) error {
	return h.finish(func() error { return h.Tx.Rollback(ctx) })
}

func (h *handlerTx) finish(savepoint func() error) error {
	if !h.lease.enter() {
		return pgx.ErrTxClosed
	}
	defer h.lease.leave()
	if !h.savepoint {
		return errNotYours
	}
	return savepoint()
}

func (h *handlerTx) CopyFrom(ctx context.Context, table pgx.Identifier, columns []string, rows pgx.CopyFromSource) (int64, error) {
	if !h.lease.enter() {
		return 0, pgx.ErrTxClosed
	}
	defer h.lease.leave()
	return h.Tx.CopyFrom(ctx, table, columns, rows)
}

func (h *handlerTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if !h.lease.enter() {
		return pgx.FailedBatchResults(batch, pgx.ErrTxClosed)
	}
	defer h.lease.leave()
	return &handlerBatchResults{BatchResults: h.Tx.SendBatch(ctx, batch), lease: h.lease}
}

// LargeObjects end with the transaction. A goroutine must not use them while the handler returns: pgx gives no way to
// guard them.
func (h *handlerTx) LargeObjects() pgx.LargeObjects {
	if !h.lease.enter() {
		return pgx.LargeObjects{}
	}
	defer h.lease.leave()
	h.lease.mu.Lock()
	h.lease.large = true
	h.lease.mu.Unlock()
	return h.Tx.LargeObjects()
}

func (h *handlerTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if !h.lease.enter() {
		return nil, pgx.ErrTxClosed
	}
	defer h.lease.leave()
	return h.Tx.Prepare(ctx, name, sql)
}

func (h *handlerTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if !h.lease.enter() {
		return pgconn.CommandTag{}, pgx.ErrTxClosed
	}
	defer h.lease.leave()
	return h.Tx.Exec(ctx, sql, args...)
}

func (h *handlerTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if !h.lease.enter() {
		return closedRows{}, pgx.ErrTxClosed
	}
	defer h.lease.leave()
	rows, err := h.Tx.Query(ctx, sql, args...)
	return &handlerRows{Rows: rows, lease: h.lease}, err //nolint:sqlclosecheck // the handler's
}

func (h *handlerTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if !h.lease.enter() {
		return closedRows{}
	}
	defer h.lease.leave()
	return handlerRow{row: h.Tx.QueryRow(ctx, sql, args...), lease: h.lease}
}

// Conn returns the connection, which must not be used after the handler returned, nor be used to end the transaction. It
// is nil then.
func (h *handlerTx) Conn() *pgx.Conn {
	if !h.lease.enter() {
		return nil
	}
	defer h.lease.leave()
	return h.Tx.Conn()
}
