package dialect

import (
	"context"
	"errors"
	"reflect"
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
	switch wrapper := err.(type) { //nolint:errorlint // walks the tree itself
	case interface{ Code() int }:
		switch wrapper.Code() & 0xff {
		case 7, 9, 10, 13: // SQLITE_NOMEM, _INTERRUPT, _IOERR, _FULL
			return true
		}
		return false
	case interface{ Unwrap() error }:
		if undoes(wrapper.Unwrap()) {
			return true
		}
	case interface{ Unwrap() []error }:
		for _, wrapped := range wrapper.Unwrap() {
			if undoes(wrapped) {
				return true
			}
		}
	}
	switch mySQLNumber(err) {
	case 1213, 1205, 1020, 3101:
		return true
	}
	return false
}

// mySQLNumber returns the code of go-sql-driver's error, which is in a field, so that it takes reflection to read it
// without the driver. It is 0 for other errors.
func mySQLNumber(err error) uint64 {
	v := reflect.ValueOf(err)
	if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
		return 0
	}
	number := v.Elem().FieldByName("Number")
	if !number.IsValid() || number.Kind() != reflect.Uint16 {
		return 0
	}
	return number.Uint()
}
