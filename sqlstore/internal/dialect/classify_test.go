package dialect_test

import (
	"context"
	"errors"
	"fmt"
	"testing"

	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

type stateError string

func (e stateError) Error() string    { return "state " + string(e) }
func (e stateError) SQLState() string { return string(e) }

type numberError struct{ Number uint16 }

func (e *numberError) Error() string { return fmt.Sprintf("number %d", e.Number) }

type codeError int

func (e codeError) Error() string { return fmt.Sprintf("code %d", int(e)) }
func (e codeError) Code() int     { return int(e) }

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
		"MySQLDeadlock":             {dialect.ClassifyMySQL, &numberError{1213}, dialect.Transient},
		"MySQLLockTimeout":          {dialect.ClassifyMySQL, fmt.Errorf("save: %w", &numberError{1205}), dialect.LockTimeout},
		"MySQLDuplicate":            {dialect.ClassifyMySQL, &numberError{1062}, dialect.UniqueViolation},
		"MySQLNilPointer":           {dialect.ClassifyMySQL, (*numberError)(nil), dialect.Other},
		"Busy":                      {dialect.ClassifySQLite, codeError(5), dialect.Transient},
		"BusySnapshot":              {dialect.ClassifySQLite, codeError(517), dialect.Transient},
		"Locked":                    {dialect.ClassifySQLite, codeError(6), dialect.Transient},
		"SQLitePrimaryKey":          {dialect.ClassifySQLite, codeError(1555), dialect.UniqueViolation},
		"SQLiteNotNull":             {dialect.ClassifySQLite, codeError(1299), dialect.Other},
		"AnotherDatabasesError":     {dialect.ClassifyMySQL, codeError(1213), dialect.Other},
		"AnotherDatabasesSQLState":  {dialect.ClassifySQLite, stateError("40001"), dialect.Other},
		"AnotherLibrarysCodeMethod": {dialect.ClassifyPostgreSQL, codeError(5), dialect.Other},
	} {
		if got := test.classify(test.err); got != test.want {
			t.Errorf("%s: class %d, want %d", name, got, test.want)
		}
	}
}
