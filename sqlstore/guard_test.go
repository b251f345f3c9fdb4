package sqlstore_test

import (
	"context"
	"database/sql"
	"database/sql/driver"
	"errors"
	"fmt"
	"io"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/go-sql-driver/mysql"
	"modernc.org/sqlite"

	"github.com/watermill-inbox/inbox/sqlstore"
)

var (
	guardedSQLite = target{"sqlite-guarded", sqlstore.SQLite, func(tb testing.TB) *sql.DB {
		tb.Helper()
		connector, err := sqlite.NewConnector(sqliteDSN(tb, busyTimeout))
		return openGuarded(tb, connector, err)
	}}
	guardedMariaDB = target{"mariadb-guarded", sqlstore.MySQL, func(tb testing.TB) *sql.DB {
		tb.Helper()
		config, err := mysql.ParseDSN(mysqlDSN(tb, func(*mysql.Config) {}))
		if err != nil {
			tb.Fatal(err)
		}
		connector, err := mysql.NewConnector(config)
		return openGuarded(tb, connector, err)
	}}
)

func openGuarded(tb testing.TB, connector driver.Connector, err error) *sql.DB {
	tb.Helper()
	if err != nil {
		tb.Fatal(err)
	}
	db := sql.OpenDB(sqlstore.Guard(connector))
	tb.Cleanup(func() {
		_ = db.Close() // which may say that a connection was lost
	})
	return db
}

// undo makes the database undo the transaction that has already written to the table of effects, and hides the error.
var undo = map[string]func(t *testing.T, db *sql.DB, tx *sql.Tx, effects string){
	"sqlite-guarded": func(t *testing.T, _ *sql.DB, tx *sql.Tx, effects string) {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
		defer cancel()
		_, err := tx.ExecContext(ctx, "WITH RECURSIVE n(i) AS (SELECT 1000 UNION ALL SELECT i + 1 FROM n) INSERT INTO "+effects+
			" SELECT i FROM n")
		if err == nil {
			t.Fatal("the statement was not interrupted")
		}
	},
	"mariadb-guarded": func(t *testing.T, db *sql.DB, tx *sql.Tx, effects string) {
		t.Helper()
		mustExec(t, db, "INSERT INTO "+effects+" VALUES (101), (102)")
		other, err := db.BeginTx(t.Context(), nil)
		if err != nil {
			t.Fatal(err)
		}
		defer func() { _ = other.Rollback() }()
		lock := "UPDATE " + effects + " SET id = id WHERE id = ?"
		// The one that changed fewer rows is undone.
		mustExec(t, other, "INSERT INTO "+effects+" VALUES (201), (202), (203), (204), (205)")
		mustExec(t, other, lock, 102)
		mustExec(t, tx, lock, 101)
		waiting := make(chan error, 1)
		go func() {
			_, err := other.Exec(lock, 101) //nolint:noctx // waits for the deadlock
			waiting <- err
		}()
		_, err = tx.ExecContext(t.Context(), lock, 102)
		if err == nil {
			t.Fatal("no deadlock")
		}
		if err := <-waiting; err != nil {
			t.Fatal(err)
		}
	},
}

func TestGuardRefusesWhatFollowsAnUndoneTransaction(t *testing.T) {
	t.Parallel()
	forEach(t, []target{guardedSQLite, guardedMariaDB}, func(t *testing.T, target target) {
		store, db, table := newStore(t, target)
		effects := newEffects(t, db)
		tx, native := begin(t, store, "id")
		mustExec(t, native, "INSERT INTO "+effects+" VALUES (1)")
		undo[target.name](t, db, native, effects)

		for name, statement := range map[string]func() error{
			"Exec": func() error {
				_, err := native.Exec("INSERT INTO " + effects + " VALUES (2)") //nolint:noctx // short
				return err
			},
			"Exec with arguments": func() error {
				_, err := native.Exec("INSERT INTO "+effects+" VALUES (?)", 2) //nolint:noctx // short
				return err
			},
			"Query": func() error {
				var n int
				return native.QueryRow("SELECT 1").Scan(&n) //nolint:noctx // short
			},
			"Prepare": func() error {
				_, err := native.Prepare("SELECT 1") //nolint:noctx,sqlclosecheck // fails
				return err
			},
		} {
			if err := statement(); err == nil || !strings.Contains(err.Error(), "refused until the rollback") {
				t.Errorf("%s: %v", name, err)
			}
		}
		err := tx.Commit(t.Context(), nil)
		wantError(t, err, nil, "inbox: ")
		if target.dialect == sqlstore.MySQL && !store.IsTransient(err) {
			t.Errorf("%v is not transient", err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Error(err)
		}
		wantCount(t, db, effects+" WHERE id < 100", 0)
		wantCount(t, db, table, 0)

		// The connection works again.
		db.SetMaxOpenConns(1)
		process(t, store, "id")
		wantCount(t, db, table, 1)
	})
}

// TestGuardNoticesARollbackOnConflict has SQLite undo the transaction for a conflict, which only the statement asks for: the
// error's code says nothing of it.
func TestGuardNoticesARollbackOnConflict(t *testing.T) {
	t.Parallel()
	for name, conflict := range map[string]string{
		"Insert":  "INSERT OR ROLLBACK INTO %s VALUES (7)",
		"Update":  "UPDATE OR ROLLBACK %s SET id = 7 WHERE id = 1",
		"Trigger": "UPDATE %s SET id = 8 WHERE id = 7",
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			store, db, table := newStore(t, guardedSQLite)
			effects := newEffects(t, db)
			mustExec(t, db, "INSERT INTO "+effects+" VALUES (7)")
			mustExec(t, db, "CREATE TRIGGER no_update_"+effects+" BEFORE UPDATE ON "+effects+" WHEN old.id = 7 BEGIN "+
				"SELECT RAISE(ROLLBACK, 'not this one'); END")
			tx, native := begin(t, store, "id")
			mustExec(t, native, "INSERT INTO "+effects+" VALUES (1)")
			failed := fmt.Sprintf(conflict, effects)
			if _, err := native.ExecContext(t.Context(), failed); err == nil {
				t.Fatal("no conflict")
			}
			_, err := native.ExecContext(t.Context(), "INSERT INTO "+effects+" VALUES (2)")
			wantError(t, err, nil, "refused until the rollback")
			wantError(t, tx.Commit(t.Context(), nil), nil, "inbox: ")
			if err := tx.Rollback(t.Context()); err != nil {
				t.Error(err)
			}
			wantCount(t, db, effects, 1)
			wantCount(t, db, table, 0)
			db.SetMaxOpenConns(1)
			process(t, store, "id")
		})
	}
}

// TestGuardLetsATransactionGoOnAfterAnErrorThatUndoesNothing: a conflict is what some handlers expect.
func TestGuardLetsATransactionGoOnAfterAnErrorThatUndoesNothing(t *testing.T) {
	t.Parallel()
	store, db, table := newStore(t, guardedSQLite)
	effects := newEffects(t, db)
	tx, native := begin(t, store, "id")
	mustExec(t, native, "INSERT INTO "+effects+" VALUES (1)")
	rows, err := native.QueryContext(t.Context(), "SELECT id FROM "+effects)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	if !rows.Next() {
		t.Fatal("no row")
	}
	for _, failed := range []string{"INSERT INTO %s VALUES (1)", "INSERT OR FAIL INTO %s VALUES (1)", "no SQL %s"} {
		if _, err := native.ExecContext(t.Context(), fmt.Sprintf(failed, effects)); err == nil {
			t.Fatal("no conflict")
		}
	}
	if err := rows.Close(); err != nil {
		t.Fatal(err)
	}
	mustExec(t, native, "INSERT INTO "+effects+" VALUES (2)")
	if err := tx.Commit(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	wantCount(t, db, effects, 2)
	wantCount(t, db, table, 1)
}

func TestGuardAllowsARawRollback(t *testing.T) {
	t.Parallel()
	_, db, _ := newStore(t, guardedSQLite)
	effects := newEffects(t, db)
	tx, err := db.BeginTx(t.Context(), nil)
	if err != nil {
		t.Fatal(err)
	}
	mustExec(t, tx, "INSERT INTO "+effects+" VALUES (1)")
	undo[guardedSQLite.name](t, db, tx, effects)
	if err := tx.Commit(); err == nil {
		t.Error("committed")
	}
	wantCount(t, db, effects, 0)
}

func TestGuardedDatabaseHoldsTheStoresContract(t *testing.T) {
	t.Parallel()
	forEach(t, []target{guardedSQLite, guardedMariaDB}, func(t *testing.T, target target) {
		store, db, _ := newStore(t, target)
		if err := store.CheckSchema(t.Context()); err != nil {
			t.Error(err)
		}
		process(t, store, "id")
		recorded(t, store, "id")
		if err := db.PingContext(t.Context()); err != nil {
			t.Error(err)
		}
	})
}

// plainDriver has none of the optional interfaces.
type plainDriver struct{}

func (plainDriver) Connect(context.Context) (driver.Conn, error) { return plainConn{}, nil }
func (plainDriver) Driver() driver.Driver                        { return nil }

type plainConn struct{}

func (plainConn) Prepare(string) (driver.Stmt, error) { return plainStmt{}, nil }
func (plainConn) Begin() (driver.Tx, error)           { return plainTx{}, nil }
func (plainConn) Close() error                        { return nil }

type plainTx struct{}

func (plainTx) Commit() error   { return nil }
func (plainTx) Rollback() error { return nil }

type plainStmt struct{}

func (plainStmt) NumInput() int                              { return -1 }
func (plainStmt) Close() error                               { return nil }
func (plainStmt) Exec([]driver.Value) (driver.Result, error) { return driver.RowsAffected(1), nil }
func (plainStmt) Query([]driver.Value) (driver.Rows, error)  { return plainRows{}, nil }

type plainRows struct{}

func (plainRows) Columns() []string         { return []string{"a"} }
func (plainRows) Close() error              { return nil }
func (plainRows) Next([]driver.Value) error { return io.EOF }

// useAll goes through everything that database/sql does with a driver.
func useAll(t *testing.T, db *sql.DB) (results []any) {
	t.Helper()
	note := func(values ...any) { results = append(results, values...) }
	defer func() { _ = db.Close() }()
	note(db.PingContext(t.Context()))
	_, err := db.ExecContext(t.Context(), "x", 1, "a", time.Unix(1, 0), []byte(nil))
	note(err)
	_, err = db.ExecContext(t.Context(), "x", sql.Named("n", 1))
	note(err != nil)
	_, err = db.ExecContext(t.Context(), "x", struct{}{})
	note(err != nil)
	rows, err := db.QueryContext(t.Context(), "x", 1)
	note(err)
	types, err := rows.ColumnTypes()
	note(err)
	for _, typ := range types {
		length, hasLength := typ.Length()
		nullable, hasNullable := typ.Nullable()
		precision, scale, hasScale := typ.DecimalSize()
		note(typ.ScanType(), typ.DatabaseTypeName(), length, hasLength, nullable, hasNullable, precision, scale, hasScale)
	}
	note(rows.Next(), rows.NextResultSet(), rows.Err(), rows.Close())
	stmt, err := db.PrepareContext(t.Context(), "x")
	note(err)
	_, err = stmt.ExecContext(t.Context(), 1)
	note(err)
	note(stmt.Close())
	_, err = db.BeginTx(t.Context(), &sql.TxOptions{Isolation: sql.LevelSerializable})
	note(err != nil)
	tx, err := db.BeginTx(t.Context(), nil)
	note(err, tx.Rollback())
	return results
}

func TestGuardBehavesAsADriverWithoutOptionalInterfaces(t *testing.T) {
	t.Parallel()
	want := useAll(t, sql.OpenDB(plainDriver{}))
	got := useAll(t, sql.OpenDB(sqlstore.Guard(plainDriver{})))
	if !reflect.DeepEqual(got, want) {
		t.Errorf("results\n%v, without the guard\n%v", got, want)
	}
}

func TestGuardKeepsRealDriversBehaviour(t *testing.T) {
	t.Parallel()
	for _, guard := range []bool{false, true} {
		connector, err := sqlite.NewConnector(sqliteDSN(t, busyTimeout))
		if err != nil {
			t.Fatal(err)
		}
		if guard {
			connector = sqlstore.Guard(connector)
		}
		db := sql.OpenDB(connector)
		mustExec(t, db, "CREATE TABLE t (a INTEGER NOT NULL, b DECIMAL(10,2), at DATETIME)")
		mustExec(t, db, "INSERT INTO t VALUES (:a, :b, :at)", sql.Named("a", 1), sql.Named("b", 1.5), sql.Named("at", time.Unix(1, 0).UTC()))
		var at time.Time
		if err := db.QueryRowContext(t.Context(), "SELECT at FROM t WHERE a = ?", 1).Scan(&at); err != nil || !at.Equal(time.Unix(1, 0)) {
			t.Errorf("guard %t: %v, %v", guard, at, err)
		}
		rows, err := db.QueryContext(t.Context(), "SELECT a, b FROM t")
		if err != nil {
			t.Fatal(err)
		}
		types, _ := rows.ColumnTypes()
		if types[1].DatabaseTypeName() != "DECIMAL(10,2)" && types[1].DatabaseTypeName() != "DECIMAL" {
			t.Errorf("guard %t: type %q", guard, types[1].DatabaseTypeName())
		}
		if err := rows.Close(); err != nil {
			t.Error(err)
		}
		conn, err := db.Conn(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		err = conn.Raw(func(driverConn any) error {
			if guarded, ok := driverConn.(interface{ Unwrap() driver.Conn }); ok {
				driverConn = guarded.Unwrap()
			} else if guard {
				return errors.New("not unwrapped")
			}
			if _, ok := driverConn.(interface{ Serialize() ([]byte, error) }); !ok {
				return errors.New("not the driver's connection")
			}
			return nil
		})
		if err != nil {
			t.Error(err)
		}
		_ = conn.Close()
		_ = db.Close()
	}
}
