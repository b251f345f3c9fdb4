package dialect

// Class says what an error means for a transaction.
type Class int

// The classes, the more telling ones later: if an error wraps several, the last of them counts.
const (
	// Other is every error that no other class is for.
	Other Class = iota

	// Aborted means that an earlier statement's error aborted the transaction, and was hidden.
	Aborted

	// Canceled means that the server stopped the statement: its context ended, a timeout, an operator.
	Canceled

	// Privilege means that the role may not do that.
	Privilege

	// Schema means that a table or column is not there.
	Schema

	// StaleStatement means that a prepared statement is no longer known, or no longer fits the table.
	StaleStatement

	// UniqueViolation means that the row exists.
	UniqueViolation

	// LockTimeout means that another transaction held a lock for longer than was waited.
	LockTimeout

	// Transient means that the transaction was undone, and may succeed when it is run again.
	Transient
)

// ClassifyPostgreSQL returns the class of an error that pgx or lib/pq returned.
func ClassifyPostgreSQL(err error) Class {
	return classify(err, func(err error) Class {
		coded, ok := err.(interface{ SQLState() string })
		if !ok {
			return Other
		}
		switch coded.SQLState() {
		case "40001", "40P01": // serialization_failure, deadlock_detected
			return Transient
		case "55P03": // lock_not_available
			return LockTimeout
		case "23505": // unique_violation
			return UniqueViolation
		case "0A000", "26000", "42P05": // cached plan must not change result type, statement not there, there already
			return StaleStatement
		case "42P01", "42703", "42P10", "3F000": // undefined table, column, conflict target, schema
			return Schema
		case "42501": // insufficient_privilege
			return Privilege
		case "57014": // query_canceled
			return Canceled
		case "25P02": // in_failed_sql_transaction
			return Aborted
		}
		return Other
	})
}

// ClassifyMySQL returns the class of an error that go-sql-driver returned.
func ClassifyMySQL(err error) Class {
	return classify(err, func(err error) Class {
		switch mySQLNumber(err) {
		case 1213, 1206, 1020, 3101: // deadlock, lock table full, record changed since last read, undone by the cluster
			return Transient
		case 1205: // lock wait timeout
			return LockTimeout
		case 1062: // duplicate entry
			return UniqueViolation
		case 1243, 1615: // unknown prepared statement, needs to be prepared again
			return StaleStatement
		case 1146, 1054, 1049: // no such table, column, database
			return Schema
		case 1317, 1969, 3024: // interrupted, statement time exceeded (MariaDB, MySQL)
			return Canceled
		}
		return Other
	})
}

// ClassifySQLite returns the class of an error that modernc.org/sqlite returned.
func ClassifySQLite(err error) Class {
	return classify(err, func(err error) Class {
		switch code := sqliteCode(err); code & 0xff { // the rest says more about the same code
		case 5, 6: // SQLITE_BUSY, SQLITE_LOCKED
			return Transient
		case 9: // SQLITE_INTERRUPT
			return Canceled
		case 17: // SQLITE_SCHEMA
			return StaleStatement
		case 19: // SQLITE_CONSTRAINT, _PRIMARYKEY, _UNIQUE
			if code == 1555 || code == 2067 {
				return UniqueViolation
			}
		case 1: // SQLITE_ERROR: for statements that are known to be right, all that is left is the table
			return Schema
		}
		return Other
	})
}

// IsSQLite reports whether err is one of modernc.org/sqlite's, or wraps one.
func IsSQLite(err error) bool {
	return contains(err, func(err error) bool { return sqliteCode(err) != 0 })
}

// IsNoTransaction reports whether err, which SQLite gave to a ROLLBACK, says that there is no transaction. Of the errors
// that it can give to one, that is the only SQLITE_ERROR.
func IsNoTransaction(err error) bool { return ClassifySQLite(err) == Schema }

// IsInTransaction reports whether err, which SQLite gave to a BEGIN, says that there is a transaction already. It is the only
// SQLITE_ERROR that it can give to one.
func IsInTransaction(err error) bool { return ClassifySQLite(err) == Schema }

// classify returns the most telling class in err's tree.
func classify(err error, class func(error) Class) Class {
	if err == nil {
		return Other
	}
	found := class(err)
	switch wrapper := err.(type) { //nolint:errorlint // walks the tree itself
	case interface{ Unwrap() error }:
		found = max(found, classify(wrapper.Unwrap(), class))
	case interface{ Unwrap() []error }:
		for _, wrapped := range wrapper.Unwrap() {
			found = max(found, classify(wrapped, class))
		}
	}
	return found
}
