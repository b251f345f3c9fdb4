package dialect

import (
	"context"
	"errors"
	"slices"
)

// Undoes reports whether err says that MySQL, MariaDB or SQLite undid the transaction, or a statement of it, so that what
// follows may be in no transaction. A statement whose context ended was interrupted.
func Undoes(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || undoes(err)
}

func undoes(err error) bool {
	if err == nil {
		return false
	}
	switch mySQLNumber(err) {
	case 1213, 1205, 1206, 1020, 3101:
		return true
	}
	switch sqliteCode(err) & 0xff {
	case 7, 9, 10, 13: // SQLITE_NOMEM, _INTERRUPT, _IOERR, _FULL
		return true
	}
	switch wrapper := err.(type) { //nolint:errorlint // walks the tree itself
	case interface{ Unwrap() error }:
		return undoes(wrapper.Unwrap())
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(wrapper.Unwrap(), undoes)
	}
	return false
}
