package dialect

import (
	"context"
	"errors"
	"slices"
)

// Undoes reports whether err says that MySQL, MariaDB or SQLite undid the transaction, or a statement of it, so that what
// follows may be in no transaction. A statement whose context ended was interrupted.
func Undoes(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) || contains(err, undoes)
}

func undoes(err error) bool {
	switch mySQLNumber(err) {
	case 1213, 1205, 1206, 1020, 3101:
		return true
	}
	switch sqliteCode(err) & 0xff {
	case 7, 9, 10, 13: // SQLITE_NOMEM, _INTERRUPT, _IOERR, _FULL
		return true
	}
	return false
}

// contains reports whether match accepts an error in err's tree.
func contains(err error, match func(error) bool) bool {
	if err == nil || match(err) {
		return err != nil
	}
	switch wrapper := err.(type) { //nolint:errorlint // walks the tree itself
	case interface{ Unwrap() error }:
		return contains(wrapper.Unwrap(), match)
	case interface{ Unwrap() []error }:
		return slices.ContainsFunc(wrapper.Unwrap(), func(err error) bool { return contains(err, match) })
	}
	return false
}
