package pgxstore

import (
	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// handlerRows are rows in a handler's transaction, which are read from its connection for as long as the lease lasts. Like
// the transaction they are closed afterwards, whoever still has them.
type handlerRows struct {
	pgx.Rows // embedded for the sake of methods that newer versions of pgx add
	lease    *lease
}

var _ pgx.Rows = (*handlerRows)(nil)

func (r *handlerRows) Close() {
	if r.lease.enter() {
		defer r.lease.leave()
		r.Rows.Close()
	}
}

func (r *handlerRows) Err() error {
	if !r.lease.enter() {
		return pgx.ErrTxClosed
	}
	defer r.lease.leave()
	return r.Rows.Err()
}

func (r *handlerRows) CommandTag() pgconn.CommandTag {
	if !r.lease.enter() {
		return pgconn.CommandTag{}
	}
	defer r.lease.leave()
	return r.Rows.CommandTag()
}

func (r *handlerRows) FieldDescriptions() []pgconn.FieldDescription {
	if !r.lease.enter() {
		return nil
	}
	defer r.lease.leave()
	return r.Rows.FieldDescriptions()
}

func (r *handlerRows) Next() bool {
	if !r.lease.enter() {
		return false
	}
	defer r.lease.leave()
	return r.Rows.Next()
}

func (r *handlerRows) Scan(dest ...any) error {
	if !r.lease.enter() {
		return pgx.ErrTxClosed
	}
	defer r.lease.leave()
	return r.Rows.Scan(dest...)
}

func (r *handlerRows) Values() ([]any, error) {
	if !r.lease.enter() {
		return nil, pgx.ErrTxClosed
	}
	defer r.lease.leave()
	return r.Rows.Values()
}

func (r *handlerRows) RawValues() [][]byte {
	if !r.lease.enter() {
		return nil
	}
	defer r.lease.leave()
	return r.Rows.RawValues()
}

func (r *handlerRows) Conn() *pgx.Conn {
	if !r.lease.enter() {
		return nil
	}
	defer r.lease.leave()
	return r.Rows.Conn()
}

func (r *handlerRows) TypeMap() *pgtype.Map {
	if !r.lease.enter() {
		return nil
	}
	defer r.lease.leave()
	return r.Rows.TypeMap()
}

// handlerRow is handlerRows for a single row.
type handlerRow struct {
	row   pgx.Row
	lease *lease
}

func (r handlerRow) Scan(dest ...any) error {
	if !r.lease.enter() {
		return pgx.ErrTxClosed
	}
	defer r.lease.leave()
	return r.row.Scan(dest...)
}

// handlerBatchResults is handlerRows for a batch.
type handlerBatchResults struct {
	pgx.BatchResults // embedded for the sake of methods that newer versions of pgx add
	lease            *lease
}

func (r *handlerBatchResults) Exec() (pgconn.CommandTag, error) {
	if !r.lease.enter() {
		return pgconn.CommandTag{}, pgx.ErrTxClosed
	}
	defer r.lease.leave()
	return r.BatchResults.Exec()
}

func (r *handlerBatchResults) Query() (pgx.Rows, error) {
	if !r.lease.enter() {
		return closedRows{}, pgx.ErrTxClosed
	}
	defer r.lease.leave()
	rows, err := r.BatchResults.Query()
	return &handlerRows{Rows: rows, lease: r.lease}, err //nolint:sqlclosecheck // the handler's
}

func (r *handlerBatchResults) QueryRow() pgx.Row {
	if !r.lease.enter() {
		return closedRows{}
	}
	defer r.lease.leave()
	return handlerRow{row: r.BatchResults.QueryRow(), lease: r.lease}
}

func (r *handlerBatchResults) Close() error {
	if !r.lease.enter() {
		return pgx.ErrTxClosed
	}
	defer r.lease.leave()
	return r.BatchResults.Close()
}

// closedRows are the rows of a query that was not sent.
type closedRows struct {
	pgx.Rows // nil, for the sake of methods that newer versions of pgx add
}

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
