package dialect

import (
	"strconv"
	"strings"
	"time"
)

// SealAfter is how long a transaction on PostgreSQL may be open and still be committed without [Statements.Seal]: its
// processed_at, written with the claim, is older than its commit by that much at most. DeleteExpired allows for it.
const SealAfter = 100 * time.Millisecond

// LockTimeoutParam is the parameter of PostgreSQL's claim that bounds its wait. It is never 0, which would mean for ever.
func LockTimeoutParam(d time.Duration) string {
	return strconv.FormatInt(min(max(d.Milliseconds(), 1), 1<<31-1), 10)
}

// PostgreSQL returns PostgreSQL's statements.
func PostgreSQL(table Table) *Statements {
	in := strings.NewReplacer(
		"{table}", table.Quoted(`"`),
		"{cutoff}", "statement_timestamp() - $1::bigint * interval '1 microsecond'",
		"{seal_after}", "interval '"+strconv.FormatInt(SealAfter.Milliseconds(), 10)+" milliseconds'",
	).Replace
	return &Statements{
		// lock_timeout is set for this statement alone: RETURNING gives the session's own value back before the handler
		// runs. Where nothing is inserted and so nothing returned, the transaction is rolled back, and the setting with
		// it. OFFSET 0 keeps the planner from evaluating the subquery anywhere else than before the insert.
		Claim: in(`
INSERT INTO {table} (consumer, message_id, received_at, processed_at, fingerprint, payload, metadata)
SELECT $1::text, $2::text, clock_timestamp(), clock_timestamp(), $4::bytea, $5::bytea, $6::bytea
FROM (
	SELECT set_config('inbox.lock_timeout', current_setting('lock_timeout'), true), set_config('lock_timeout', $3::text, true)
	OFFSET 0
) AS bounded
ON CONFLICT (consumer, message_id) DO NOTHING
RETURNING set_config('lock_timeout', current_setting('inbox.lock_timeout'), true)`),

		Record: in(`
SELECT (extract(epoch FROM received_at) * 1000000)::bigint, (extract(epoch FROM processed_at) * 1000000)::bigint,
	fingerprint, outputs
FROM {table}
WHERE consumer = $1::text AND message_id = $2::text`),

		Seal: in(`
UPDATE {table} SET processed_at = clock_timestamp()
WHERE consumer = $1::text AND message_id = $2::text`),

		SealOutputs: in(`
UPDATE {table} SET processed_at = clock_timestamp(), outputs = $1::bytea
WHERE consumer = $2::text AND message_id = $3::text`),

		Forget: in(`
DELETE FROM {table}
WHERE consumer = $1::text AND message_id = $2::text`),

		// statement_timestamp() and not clock_timestamp(), which is volatile and would rule out the index.
		// received_at is what the index knows, processed_at what decides; the former is never the later one.
		//
		// Rows are found again by where they are, which costs no look into an index. Joining by the key instead lets the
		// planner read the whole table for it, as it does when it thinks that the table is small. The key is compared
		// nevertheless: partitions have rows in the same places.
		DeleteExpired: in(`
WITH expired AS (
	SELECT ctid, consumer, message_id
	FROM {table}
	WHERE outputs IS NULL
		AND received_at >= timestamptz '1970-01-01 00:00:00+00' + $3::bigint * interval '1 microsecond'
		AND received_at < {cutoff} - {seal_after}
		AND processed_at < {cutoff} - {seal_after}
	ORDER BY received_at
	LIMIT $2::bigint
	FOR UPDATE SKIP LOCKED
), deleted AS (
	DELETE FROM {table}
	WHERE ctid = ANY (ARRAY(SELECT ctid FROM expired))
		AND (consumer, message_id) IN (SELECT consumer, message_id FROM expired)
	RETURNING received_at
)
SELECT count(*), coalesce((extract(epoch FROM max(received_at)) * 1000000)::bigint, 0) FROM deleted`),

		OldestAge: in(`
SELECT (extract(epoch FROM statement_timestamp() - received_at) * 1000000)::bigint
FROM {table}
WHERE outputs IS NULL
ORDER BY received_at
LIMIT 1`),

		CountStranded: in(`
SELECT count(*)
FROM {table}
WHERE outputs IS NOT NULL AND received_at <= {cutoff}`),

		Stranded: in(`
SELECT consumer, message_id,
	(extract(epoch FROM received_at) * 1000000)::bigint, (extract(epoch FROM processed_at) * 1000000)::bigint,
	outputs
FROM {table}
WHERE outputs IS NOT NULL AND received_at <= {cutoff}
	AND (received_at, consumer, message_id)
		> (timestamptz '1970-01-01 00:00:00+00' + $2::bigint * interval '1 microsecond', $3::text, $4::text)
ORDER BY received_at, consumer, message_id
LIMIT $5::bigint`),

		MarkPublished: func(keys int) string {
			placeholders := make([]string, keys)
			for i := range placeholders {
				placeholders[i] = "($" + strconv.Itoa(2*i+1) + "::text, $" + strconv.Itoa(2*i+2) + "::text)"
			}
			return in(`
UPDATE {table} SET outputs = NULL, outputs_published_at = clock_timestamp()
WHERE outputs IS NOT NULL AND (consumer, message_id) IN (`) + strings.Join(placeholders, ", ") + ")"
		},
	}
}
