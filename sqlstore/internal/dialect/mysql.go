package dialect

import (
	"strconv"
	"strings"
	"time"
)

// ClaimWithin returns MariaDB's claim, whose wait for a lock is bounded by about d, for this statement alone. The server
// counts whole seconds, at least one of which is waited, and they have to be in the text: there are few of them, so that
// there are few texts to prepare.
func (s *Statements) ClaimWithin(d time.Duration) string {
	seconds := max(int64(d.Round(time.Second)/time.Second), 1)
	switch {
	case seconds > 3600:
		seconds = 3600
	case seconds > 60:
		seconds -= seconds % 60
	case seconds > 10:
		seconds -= seconds % 10
	}
	return "SET STATEMENT innodb_lock_wait_timeout=" + strconv.FormatInt(seconds, 10) + " FOR " + strings.TrimSpace(s.Claim)
}

// MySQL returns the statements of MySQL and MariaDB.
func MySQL(table Table) *Statements {
	t := table.Quoted("`")
	in := strings.NewReplacer("{table}", t).Replace
	return &Statements{
		Claim: in(`
INSERT INTO {table} (consumer, message_id, received_at, fingerprint, payload, metadata)
VALUES (?, ?, UTC_TIMESTAMP(6), ?, ?, ?)`),

		Record: in(`
SELECT TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', received_at),
	TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', processed_at),
	fingerprint, outputs
FROM {table}
WHERE consumer = ? AND message_id = ?`),

		Seal: in(`
UPDATE {table} SET processed_at = UTC_TIMESTAMP(6)
WHERE consumer = ? AND message_id = ? AND processed_at IS NULL`),

		SealOutputs: in(`
UPDATE {table} SET processed_at = UTC_TIMESTAMP(6), outputs = ?, outputs_pending = TRUE
WHERE consumer = ? AND message_id = ? AND processed_at IS NULL`),

		Forget: in(`
DELETE FROM {table}
WHERE consumer = ? AND message_id = ?`),

		// Neither MySQL nor MariaDB knows DELETE … SKIP LOCKED, hence two statements.
		SelectExpired: in(`
SELECT consumer, message_id
FROM {table}
WHERE outputs_pending = FALSE
	AND received_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND
	AND processed_at < UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND
ORDER BY received_at
LIMIT ?
FOR UPDATE`),

		OldestAge: in(`
SELECT TIMESTAMPDIFF(MICROSECOND, received_at, UTC_TIMESTAMP(6))
FROM {table}
WHERE outputs_pending = FALSE AND processed_at IS NOT NULL
ORDER BY received_at
LIMIT 1`),

		CountStranded: in(`
SELECT COUNT(*)
FROM {table}
WHERE outputs_pending = TRUE AND received_at <= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND`),

		Stranded: in(`
SELECT consumer, message_id,
	TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', received_at),
	TIMESTAMPDIFF(MICROSECOND, TIMESTAMP'1970-01-01 00:00:00', processed_at),
	outputs
FROM {table}
WHERE outputs_pending = TRUE AND received_at <= UTC_TIMESTAMP(6) - INTERVAL ? MICROSECOND
	AND (received_at, consumer, message_id) > (TIMESTAMP'1970-01-01 00:00:00' + INTERVAL ? MICROSECOND, ?, ?)
ORDER BY received_at, consumer, message_id
LIMIT ?`),

		// These look up one key after the other, whatever the optimizer thinks of it: on a small table it would rather scan
		// the index, and wait for the lock of every claim in flight.
		MarkPublished: func(keys int) string {
			return in(`
UPDATE (`) + keyList(keys) + in(`) AS k
STRAIGHT_JOIN {table} AS t FORCE INDEX (PRIMARY) ON t.consumer = k.consumer AND t.message_id = k.message_id
SET t.outputs = NULL, t.outputs_pending = FALSE, t.outputs_published_at = UTC_TIMESTAMP(6)
WHERE t.outputs_pending = TRUE`)
		},

		DeleteKeys: func(keys int) string {
			return in(`
DELETE t
FROM (`) + keyList(keys) + in(`) AS k
STRAIGHT_JOIN {table} AS t FORCE INDEX (PRIMARY) ON t.consumer = k.consumer AND t.message_id = k.message_id`)
		},
	}
}

func keyList(keys int) string {
	return list("SELECT CAST(? AS BINARY) AS consumer, CAST(? AS BINARY) AS message_id", " UNION ALL ", keys)
}
