package sqlstore

import (
	"context"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"

	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

// Guard wraps the connector of a MySQL, MariaDB or SQLite driver, for [database/sql.OpenDB]. It is the recommended way to
// open these databases for an inbox.
//
// They can undo a transaction, or a part of it, in the middle: a deadlock on MySQL, an interrupted statement on SQLite.
// What follows on the connection is then in no transaction, and stays even after a rollback. A store notices that before
// it commits, but too late for what a handler wrote after it ignored the error. A guarded connection refuses every
// further statement, and the commit, until the transaction is rolled back, and says which error it was.
//
// The errors are deadlock, lock wait timeout, full lock table, changed record and rollback by the cluster (1213, 1205,
// 1206, 1020, 3101) on MySQL and MariaDB; interrupt, full disk, I/O error and lack of memory on SQLite. Errors of other
// databases change nothing. What a conflict on SQLite rolls back (INSERT OR ROLLBACK, RAISE(ROLLBACK)) counts as well.
//
// A guarded connection has every optional interface of the driver's; where the driver lacks one, it behaves as
// database/sql does without. [database/sql.Conn.Raw] hands out the guarded connection, whose method
// Unwrap() driver.Conn returns the driver's own.
func Guard(connector driver.Connector) driver.Connector {
	return guardedConnector{connector}
}

type guardedConnector struct{ driver.Connector }

func (c guardedConnector) Connect(ctx context.Context) (driver.Conn, error) {
	conn, err := c.Connector.Connect(ctx)
	if err != nil {
		return nil, err
	}
	return &guardedConn{Conn: conn}, nil
}

// Close closes the driver's connector, if it can be closed.
func (c guardedConnector) Close() error {
	if closer, ok := c.Connector.(io.Closer); ok {
		return closer.Close()
	}
	return nil
}

// guardedConn is used by one goroutine at a time, as every driver.Conn.
type guardedConn struct {
	driver.Conn
	inTx   bool
	undone error // what undid the transaction, or a part of it
}

// Unwrap returns the driver's own connection.
func (c *guardedConn) Unwrap() driver.Conn { return c.Conn }

// refuse returns an error if the transaction was undone.
func (c *guardedConn) refuse() error {
	if c.undone == nil {
		return nil
	}
	return fmt.Errorf("inbox: statement refused until the rollback: an earlier one of the transaction failed, and undid it "+
		"or a part of it: %w", c.undone)
}

// check notes an error that undid the transaction, and returns err.
func (c *guardedConn) check(err error) error {
	if err != nil && c.inTx && c.undone == nil && (dialect.Undoes(err) || dialect.IsSQLite(err) && c.isUndone()) {
		c.undone = err
	}
	return err
}

// isUndone asks SQLite whether the transaction is gone, which after INSERT OR ROLLBACK or RAISE(ROLLBACK) only the database
// knows. In a transaction, BEGIN is an error and does nothing.
func (c *guardedConn) isUndone() bool {
	tx, err := c.Conn.Begin() //nolint:staticcheck // what there is without a context
	if err == nil {
		_ = tx.Rollback()
	}
	return !dialect.IsInTransaction(err)
}

// isRollback reports whether query is the one statement that is never refused.
func isRollback(query string) bool {
	return strings.EqualFold(strings.TrimRight(strings.TrimSpace(query), "; "), "rollback")
}

// rolledBack notes that the transaction is over: it was rolled back, or was undone as a whole.
func (c *guardedConn) rolledBack(err error) {
	if err == nil || dialect.IsNoTransaction(err) {
		c.inTx, c.undone = false, nil
	}
}

func (c *guardedConn) Prepare(query string) (driver.Stmt, error) {
	return c.PrepareContext(context.Background(), query)
}

func (c *guardedConn) PrepareContext(ctx context.Context, query string) (driver.Stmt, error) {
	if err := c.refuse(); err != nil && !isRollback(query) {
		return nil, err
	}
	var stmt driver.Stmt
	var err error
	if preparer, ok := c.Conn.(driver.ConnPrepareContext); ok {
		stmt, err = preparer.PrepareContext(ctx, query)
	} else if stmt, err = c.Conn.Prepare(query); err == nil && ctx.Err() != nil {
		_ = stmt.Close()
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, c.check(err)
	}
	return &guardedStmt{Stmt: stmt, conn: c, rollback: isRollback(query)}, nil
}

func (c *guardedConn) ExecContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Result, error) {
	rollback := isRollback(query)
	if err := c.refuse(); err != nil && !rollback {
		return nil, err
	}
	var result driver.Result
	var err error
	switch execer := c.Conn.(type) {
	case driver.ExecerContext:
		result, err = execer.ExecContext(ctx, query, args)
	case driver.Execer: //nolint:staticcheck // what database/sql falls back to
		var values []driver.Value
		if values, err = positional(ctx, args); err == nil {
			result, err = execer.Exec(query, values)
		}
	default:
		return nil, driver.ErrSkip
	}
	if rollback {
		c.rolledBack(err)
	}
	return result, c.check(err)
}

func (c *guardedConn) QueryContext(ctx context.Context, query string, args []driver.NamedValue) (driver.Rows, error) {
	if err := c.refuse(); err != nil {
		return nil, err
	}
	var rows driver.Rows
	var err error
	switch queryer := c.Conn.(type) {
	case driver.QueryerContext:
		rows, err = queryer.QueryContext(ctx, query, args)
	case driver.Queryer: //nolint:staticcheck // what database/sql falls back to
		var values []driver.Value
		if values, err = positional(ctx, args); err == nil {
			rows, err = queryer.Query(query, values)
		}
	default:
		return nil, driver.ErrSkip
	}
	return c.guardRows(rows, err)
}

func (c *guardedConn) guardRows(rows driver.Rows, err error) (driver.Rows, error) {
	if err != nil {
		return nil, c.check(err)
	}
	return &guardedRows{Rows: rows, conn: c}, nil
}

// Begin is what database/sql called before there was BeginTx.
func (c *guardedConn) Begin() (driver.Tx, error) {
	return c.BeginTx(context.Background(), driver.TxOptions{})
}

func (c *guardedConn) BeginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if err := c.refuse(); err != nil {
		return nil, err
	}
	tx, err := c.beginTx(ctx, opts)
	if err != nil {
		return nil, err
	}
	c.inTx = true
	return guardedTx{Tx: tx, conn: c}, nil
}

func (c *guardedConn) beginTx(ctx context.Context, opts driver.TxOptions) (driver.Tx, error) {
	if beginner, ok := c.Conn.(driver.ConnBeginTx); ok {
		return beginner.BeginTx(ctx, opts)
	}
	if opts != (driver.TxOptions{}) {
		return nil, errors.New("inbox: begin transaction: the driver has no transaction options")
	}
	tx, err := c.Conn.Begin() //nolint:staticcheck // what database/sql falls back to
	if err == nil && ctx.Err() != nil {
		_ = tx.Rollback()
		return nil, ctx.Err()
	}
	return tx, err
}

func (c *guardedConn) Ping(ctx context.Context) error {
	if pinger, ok := c.Conn.(driver.Pinger); ok {
		return pinger.Ping(ctx)
	}
	return nil
}

func (c *guardedConn) ResetSession(ctx context.Context) error {
	if resetter, ok := c.Conn.(driver.SessionResetter); ok {
		return resetter.ResetSession(ctx)
	}
	return nil
}

// IsValid keeps a connection out of the pool that was not rolled back.
func (c *guardedConn) IsValid() bool {
	if c.undone != nil {
		return false
	}
	if validator, ok := c.Conn.(driver.Validator); ok {
		return validator.IsValid()
	}
	return true
}

func (c *guardedConn) CheckNamedValue(value *driver.NamedValue) error {
	if checker, ok := c.Conn.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(value)
	}
	return driver.ErrSkip
}

type guardedTx struct {
	driver.Tx
	conn *guardedConn
}

// Commit rolls back instead if the transaction was undone: what came after it must not stay.
func (t guardedTx) Commit() error {
	if err := t.conn.refuse(); err != nil {
		return errors.Join(err, t.Rollback())
	}
	err := t.Tx.Commit()
	t.conn.inTx = false
	return err
}

func (t guardedTx) Rollback() error {
	err := t.Tx.Rollback()
	t.conn.rolledBack(err)
	return err
}

type guardedStmt struct {
	driver.Stmt
	conn     *guardedConn
	rollback bool
}

func (s *guardedStmt) ExecContext(ctx context.Context, args []driver.NamedValue) (driver.Result, error) {
	if err := s.conn.refuse(); err != nil && !s.rollback {
		return nil, err
	}
	var result driver.Result
	var err error
	if execer, ok := s.Stmt.(driver.StmtExecContext); ok {
		result, err = execer.ExecContext(ctx, args)
	} else {
		var values []driver.Value
		if values, err = positional(ctx, args); err == nil {
			result, err = s.Stmt.Exec(values) //nolint:staticcheck // what database/sql falls back to
		}
	}
	if s.rollback {
		s.conn.rolledBack(err)
	}
	return result, s.conn.check(err)
}

func (s *guardedStmt) QueryContext(ctx context.Context, args []driver.NamedValue) (driver.Rows, error) {
	if err := s.conn.refuse(); err != nil {
		return nil, err
	}
	var rows driver.Rows
	var err error
	if queryer, ok := s.Stmt.(driver.StmtQueryContext); ok {
		rows, err = queryer.QueryContext(ctx, args)
	} else {
		var values []driver.Value
		if values, err = positional(ctx, args); err == nil {
			rows, err = s.Stmt.Query(values) //nolint:staticcheck // what database/sql falls back to
		}
	}
	return s.conn.guardRows(rows, err)
}

// CheckNamedValue asks the statement and then the connection, as database/sql does.
func (s *guardedStmt) CheckNamedValue(value *driver.NamedValue) error {
	if checker, ok := s.Stmt.(driver.NamedValueChecker); ok {
		return checker.CheckNamedValue(value)
	}
	return s.conn.CheckNamedValue(value)
}

func (s *guardedStmt) ColumnConverter(index int) driver.ValueConverter {
	if converter, ok := s.Stmt.(driver.ColumnConverter); ok { //nolint:staticcheck // what database/sql falls back to
		return converter.ColumnConverter(index)
	}
	return driver.DefaultParameterConverter
}

// guardedRows notices an error that comes with the rows.
type guardedRows struct {
	driver.Rows
	conn *guardedConn
}

func (r *guardedRows) Next(dest []driver.Value) error { return r.conn.check(r.Rows.Next(dest)) }

func (r *guardedRows) HasNextResultSet() bool {
	rows, ok := r.Rows.(driver.RowsNextResultSet)
	return ok && rows.HasNextResultSet()
}

func (r *guardedRows) NextResultSet() error {
	if rows, ok := r.Rows.(driver.RowsNextResultSet); ok {
		return r.conn.check(rows.NextResultSet())
	}
	return io.EOF
}

func (r *guardedRows) ColumnTypeScanType(index int) reflect.Type {
	if rows, ok := r.Rows.(driver.RowsColumnTypeScanType); ok {
		return rows.ColumnTypeScanType(index)
	}
	return reflect.TypeFor[any]()
}

func (r *guardedRows) ColumnTypeDatabaseTypeName(index int) string {
	if rows, ok := r.Rows.(driver.RowsColumnTypeDatabaseTypeName); ok {
		return rows.ColumnTypeDatabaseTypeName(index)
	}
	return ""
}

func (r *guardedRows) ColumnTypeLength(index int) (length int64, ok bool) {
	if rows, has := r.Rows.(driver.RowsColumnTypeLength); has {
		return rows.ColumnTypeLength(index)
	}
	return 0, false
}

func (r *guardedRows) ColumnTypeNullable(index int) (nullable, ok bool) {
	if rows, has := r.Rows.(driver.RowsColumnTypeNullable); has {
		return rows.ColumnTypeNullable(index)
	}
	return false, false
}

func (r *guardedRows) ColumnTypePrecisionScale(index int) (precision, scale int64, ok bool) {
	if rows, has := r.Rows.(driver.RowsColumnTypePrecisionScale); has {
		return rows.ColumnTypePrecisionScale(index)
	}
	return 0, 0, false
}

// positional returns the arguments for a driver that knows neither contexts nor names.
func positional(ctx context.Context, args []driver.NamedValue) ([]driver.Value, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	values := make([]driver.Value, len(args))
	for i, arg := range args {
		if arg.Name != "" {
			return nil, errors.New("inbox: the driver knows no named arguments")
		}
		values[i] = arg.Value
	}
	return values, nil
}
