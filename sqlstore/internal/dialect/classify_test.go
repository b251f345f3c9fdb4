package dialect_test

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"testing"
	"unsafe"

	"github.com/go-sql-driver/mysql"
	"modernc.org/sqlite"

	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

type stateError string

func (e stateError) Error() string    { return "state " + string(e) }
func (e stateError) SQLState() string { return string(e) }

func mySQLError(number uint16) error { return &mysql.MySQLError{Number: number} }

// sqliteError returns an error of the driver's, whose code nobody else can set.
func sqliteError(code int64) error {
	err := new(sqlite.Error)
	field := reflect.ValueOf(err).Elem().FieldByName("code")
	reflect.NewAt(field.Type(), unsafe.Pointer(field.UnsafeAddr())).Elem().SetInt(code) //nolint:gosec // see above
	return err
}

// Errors of an application, which look like a driver's.
type (
	numberError struct{ Number uint16 }
	codeError   int
)

func (e *numberError) Error() string { return fmt.Sprintf("number %d", e.Number) }
func (e codeError) Error() string    { return fmt.Sprintf("code %d", int(e)) }
func (e codeError) Code() int        { return int(e) }

func TestErrorsAreClassifiedByCode(t *testing.T) {
	t.Parallel()

	serialization, aborted := stateError("40001"), stateError("25P02")
	for name, test := range map[string]struct {
		classify func(error) dialect.Class
		err      error
		want     dialect.Class
	}{
		"Nil":                       {dialect.ClassifyPostgreSQL, nil, dialect.Other},
		"NoCode":                    {dialect.ClassifyPostgreSQL, context.Canceled, dialect.Other},
		"Serialization":             {dialect.ClassifyPostgreSQL, serialization, dialect.Transient},
		"PostgreSQLDeadlock":        {dialect.ClassifyPostgreSQL, stateError("40P01"), dialect.Transient},
		"PostgreSQLLockTimeout":     {dialect.ClassifyPostgreSQL, stateError("55P03"), dialect.LockTimeout},
		"StalePlan":                 {dialect.ClassifyPostgreSQL, stateError("0A000"), dialect.StaleStatement},
		"Wrapped":                   {dialect.ClassifyPostgreSQL, fmt.Errorf("save: %w", serialization), dialect.Transient},
		"Joined":                    {dialect.ClassifyPostgreSQL, errors.Join(errors.New("other"), serialization), dialect.Transient},
		"TheMostTellingOfAll":       {dialect.ClassifyPostgreSQL, errors.Join(serialization, aborted), dialect.Transient},
		"WrappedTwice":              {dialect.ClassifyPostgreSQL, fmt.Errorf("%w, %w", context.Canceled, aborted), dialect.Aborted},
		"MySQLDeadlock":             {dialect.ClassifyMySQL, mySQLError(1213), dialect.Transient},
		"MySQLLockTableFull":        {dialect.ClassifyMySQL, mySQLError(1206), dialect.Transient},
		"MySQLLockTimeout":          {dialect.ClassifyMySQL, fmt.Errorf("save: %w", mySQLError(1205)), dialect.LockTimeout},
		"MySQLDuplicate":            {dialect.ClassifyMySQL, mySQLError(1062), dialect.UniqueViolation},
		"MySQLNilPointer":           {dialect.ClassifyMySQL, (*mysql.MySQLError)(nil), dialect.Other},
		"Busy":                      {dialect.ClassifySQLite, sqliteError(5), dialect.Transient},
		"BusySnapshot":              {dialect.ClassifySQLite, sqliteError(517), dialect.Transient},
		"Locked":                    {dialect.ClassifySQLite, sqliteError(6), dialect.Transient},
		"SQLitePrimaryKey":          {dialect.ClassifySQLite, sqliteError(1555), dialect.UniqueViolation},
		"SQLiteNotNull":             {dialect.ClassifySQLite, sqliteError(1299), dialect.Other},
		"AnotherDatabasesError":     {dialect.ClassifyMySQL, sqliteError(1213), dialect.Other},
		"AnotherDatabasesSQLState":  {dialect.ClassifySQLite, stateError("40001"), dialect.Other},
		"AnotherLibrarysCodeMethod": {dialect.ClassifyPostgreSQL, sqliteError(5), dialect.Other},
		"ApplicationsNumber":        {dialect.ClassifyMySQL, &numberError{1213}, dialect.Other},
		"ApplicationsCode":          {dialect.ClassifySQLite, codeError(5), dialect.Other},
	} {
		if got := test.classify(test.err); got != test.want {
			t.Errorf("%s: class %d, want %d", name, got, test.want)
		}
	}
}

func TestOnlyErrorsOfTheDatabaseUndoATransaction(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		err  error
		want bool
	}{
		"Nil":                {nil, false},
		"MySQLDeadlock":      {mySQLError(1213), true},
		"MySQLLockTableFull": {mySQLError(1206), true},
		"MySQLDuplicate":     {mySQLError(1062), false},
		"SQLiteFull":         {sqliteError(13), true},
		"SQLiteIO":           {sqliteError(1290), true},
		"SQLiteConstraint":   {sqliteError(1555), false},
		"Wrapped":            {fmt.Errorf("save: %w", mySQLError(1205)), true},
		"Joined":             {errors.Join(errors.New("other"), sqliteError(9)), true},
		"Interrupted":        {context.Canceled, true},
		"ApplicationsNumber": {&numberError{1213}, false},
		"ApplicationsCode":   {codeError(13), false},
		"ApplicationsWraps":  {fmt.Errorf("%w: %w", codeError(1), mySQLError(1213)), true},
	} {
		if got := dialect.Undoes(test.err); got != test.want {
			t.Errorf("%s: %t, want %t", name, got, test.want)
		}
	}
}
