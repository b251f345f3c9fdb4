// Package dialect holds what the SQL stores share and what differs by database: the text of every statement, the meaning
// of error codes, and the binary form of stored messages. It runs nothing and imports no driver.
package dialect

import "strings"

// Statements are a database's statements for one table. The comment of each names its parameters in order; where several
// statements of a kind differ in their parameters by database, it says so. Keys are in their stored form. Points in time
// leave the database as microseconds since 1970 in UTC, so that neither a session's time zone nor a driver's settings can
// shift them; ages go in as microseconds.
type Statements struct {
	// Claim inserts the unsealed row (on PostgreSQL, which loses no transaction silently: the sealed one). Parameters:
	// consumer, message ID, on PostgreSQL [LockTimeoutParam], fingerprint, payload, metadata. PostgreSQL and SQLite
	// affect no row if there is one; MySQL fails with a [UniqueViolation].
	Claim string

	// Record selects what [NewRecord] takes: received_at, processed_at (null: unsealed), fingerprint, outputs.
	// Parameters: consumer, message ID.
	Record string

	// Seal sets processed_at; it must change one row. Parameters: consumer, message ID.
	Seal string

	// SealOutputs sets processed_at and outputs; it must change one row. Parameters: outputs, consumer, message ID.
	SealOutputs string

	// Forget deletes a row. Parameters: consumer, message ID.
	Forget string

	// DeleteExpired deletes the rows without unpublished outputs that were sealed longer ago than an age, oldest first.
	// Parameters: age, limit. On PostgreSQL there is a third, the received_at from which on, and the result is a row: how
	// many were deleted, and the latest received_at of them; see [ExpiredCursor]. Empty on MySQL, where it takes
	// SelectExpired and DeleteKeys.
	DeleteExpired string

	// SelectExpired selects consumer and message ID of the rows that DeleteExpired means, and locks them. Parameters:
	// age, age again, limit. Empty except on MySQL. SKIP LOCKED may be appended.
	SelectExpired string

	// OldestAge selects the age of the oldest row that DeleteExpired could delete; no row if there is none.
	OldestAge string

	// CountStranded counts the rows with unpublished outputs that were received longer ago than an age. Parameters: age.
	CountStranded string

	// Stranded selects consumer, message ID, received_at, processed_at and outputs of those rows, oldest first, after a
	// position. Parameters: age, received_at, consumer, message ID, limit.
	Stranded string

	// MarkPublished drops the outputs of so many keys. Parameters: consumer and message ID of each.
	MarkPublished func(keys int) string

	// DeleteKeys deletes the rows of so many keys. Parameters: consumer and message ID of each. Nil except on MySQL.
	DeleteKeys func(keys int) string
}

// list returns n copies of item with sep between them.
func list(item, sep string, n int) string {
	return strings.TrimSuffix(strings.Repeat(item+sep, n), sep)
}
