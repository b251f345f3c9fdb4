package pgxstore

import (
	"context"
	"errors"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
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
}

func newLease(store *Store, tx pgx.Tx) *lease {
	l := &lease{store: store}
	l.tx = &handlerTx{lease: l, tx: tx}
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

// end ends the lease. Calls that are under way are waited for; if ctx ends first, the connection is cut under them.
func (l *lease) end(ctx context.Context, conn *pgxpool.Conn) {
	l.mu.Lock()
	if l.over || l.calls == 0 {
		l.over = true
		l.mu.Unlock()
		return
	}
	l.over, l.drained = true, make(chan struct{})
	l.mu.Unlock()

	select {
	case <-l.drained:
	case <-ctx.Done():
		_ = conn.Conn().PgConn().Conn().Close()
		<-l.drained
	}
}

// handlerTx is the pgx.Tx that a handler gets: pgx's own, or a savepoint in it, for as long as the lease lasts. After
// that, every method returns pgx.ErrTxClosed, or nothing if it has no error to return.
type handlerTx struct {
	lease     *lease
	tx        pgx.Tx
	savepoint bool
}

var _ pgx.Tx = (*handlerTx)(nil)

// Begin sets a savepoint, which Commit and Rollback of the returned pgx.Tx release or roll back to.
func (h *handlerTx) Begin(ctx context.Context) (pgx.Tx, error) {
	if !h.lease.enter() {
		return nil, pgx.ErrTxClosed
	}
	defer h.lease.leave()
	tx, err := h.tx.Begin(ctx)
	if err != nil {
		return nil, err
	}
	return &handlerTx{lease: h.lease, tx: tx, savepoint: true}, nil
}

// Commit releases a savepoint. The transaction itself is committed by the inbox.
func (h *handlerTx) Commit(ctx context.Context) error {
	return h.finish(func() error { return h.tx.Commit(ctx) })
}

// Rollback rolls back to a savepoint. The transaction itself is rolled back by the inbox.
func (h *handlerTx) Rollback(ctx context.Context) error {
	return h.finish(func() error { return h.tx.Rollback(ctx) })
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
	return h.tx.CopyFrom(ctx, table, columns, rows)
}

func (h *handlerTx) SendBatch(ctx context.Context, batch *pgx.Batch) pgx.BatchResults {
	if !h.lease.enter() {
		return pgx.FailedBatchResults(batch, pgx.ErrTxClosed)
	}
	defer h.lease.leave()
	return h.tx.SendBatch(ctx, batch)
}

// LargeObjects must not be used after the handler returned: pgx gives no way to guard them.
func (h *handlerTx) LargeObjects() pgx.LargeObjects {
	if !h.lease.enter() {
		return pgx.LargeObjects{}
	}
	defer h.lease.leave()
	return h.tx.LargeObjects()
}

func (h *handlerTx) Prepare(ctx context.Context, name, sql string) (*pgconn.StatementDescription, error) {
	if !h.lease.enter() {
		return nil, pgx.ErrTxClosed
	}
	defer h.lease.leave()
	return h.tx.Prepare(ctx, name, sql)
}

func (h *handlerTx) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if !h.lease.enter() {
		return pgconn.CommandTag{}, pgx.ErrTxClosed
	}
	defer h.lease.leave()
	return h.tx.Exec(ctx, sql, args...)
}

func (h *handlerTx) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if !h.lease.enter() {
		return closedRows{}, pgx.ErrTxClosed
	}
	defer h.lease.leave()
	return h.tx.Query(ctx, sql, args...) //nolint:sqlclosecheck // the handler's
}

func (h *handlerTx) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if !h.lease.enter() {
		return closedRows{}
	}
	defer h.lease.leave()
	return h.tx.QueryRow(ctx, sql, args...)
}

// Conn returns the connection, which must not be used after the handler returned, nor be used to end the transaction. It
// is nil then.
func (h *handlerTx) Conn() *pgx.Conn {
	if !h.lease.enter() {
		return nil
	}
	defer h.lease.leave()
	return h.tx.Conn()
}

// closedRows are the rows of a query that was not sent.
type closedRows struct{}

func (closedRows) Close()                                       {}
func (closedRows) Err() error                                   { return pgx.ErrTxClosed }
func (closedRows) CommandTag() pgconn.CommandTag                { return pgconn.CommandTag{} }
func (closedRows) FieldDescriptions() []pgconn.FieldDescription { return nil }
func (closedRows) Next() bool                                   { return false }
func (closedRows) Scan(...any) error                            { return pgx.ErrTxClosed }
func (closedRows) Values() ([]any, error)                       { return nil, pgx.ErrTxClosed }
func (closedRows) RawValues() [][]byte                          { return nil }
func (closedRows) Conn() *pgx.Conn                              { return nil }
func (closedRows) TypeMap() *pgtype.Map                         { return nil }
