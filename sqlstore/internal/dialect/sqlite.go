package dialect

import "strings"

// SQLite returns SQLite's statements.
func SQLite(table Table) *Statements {
	in := strings.NewReplacer(
		"{table}", table.Quoted(`"`),
		"{now}", `strftime('%Y-%m-%d %H:%M:%f', 'now')`,
		"{cutoff}", `strftime('%Y-%m-%d %H:%M:%f', 'now', (?1 / -1000000.0) || ' seconds')`,
		"{received_at}", `strftime('%s', received_at) * 1000000 + substr(received_at, 21, 3) * 1000`,
		"{processed_at}", `strftime('%s', processed_at) * 1000000 + substr(processed_at, 21, 3) * 1000`,
	).Replace
	return &Statements{
		Claim: in(`
INSERT INTO {table} (consumer, message_id, received_at, fingerprint, payload, metadata)
VALUES (?1, ?2, {now}, ?3, ?4, ?5)
ON CONFLICT (consumer, message_id) DO NOTHING`),

		Record: in(`
SELECT {received_at}, {processed_at}, fingerprint, outputs
FROM {table}
WHERE consumer = ?1 AND message_id = ?2`),

		Seal: in(`
UPDATE {table} SET processed_at = {now}
WHERE consumer = ?1 AND message_id = ?2 AND processed_at IS NULL`),

		SealOutputs: in(`
UPDATE {table} SET processed_at = {now}, outputs = ?1
WHERE consumer = ?2 AND message_id = ?3 AND processed_at IS NULL`),

		Forget: in(`
DELETE FROM {table}
WHERE consumer = ?1 AND message_id = ?2`),

		DeleteExpired: in(`
DELETE FROM {table}
WHERE (consumer, message_id) IN (
	SELECT consumer, message_id
	FROM {table}
	WHERE outputs IS NULL AND received_at < {cutoff} AND processed_at < {cutoff}
	ORDER BY received_at
	LIMIT ?2
)`),

		OldestAge: in(`
SELECT (strftime('%s', 'now') * 1000000 + substr(strftime('%f', 'now'), 4, 3) * 1000) - ({received_at})
FROM {table}
WHERE outputs IS NULL AND processed_at IS NOT NULL
ORDER BY received_at
LIMIT 1`),

		CountStranded: in(`
SELECT count(*)
FROM {table}
WHERE outputs IS NOT NULL AND received_at <= {cutoff}`),

		Stranded: in(`
SELECT consumer, message_id, {received_at}, {processed_at}, outputs
FROM {table}
WHERE outputs IS NOT NULL AND received_at <= {cutoff}
	AND (received_at, consumer, message_id) > (strftime('%Y-%m-%d %H:%M:%f', ?2 / 1000000.0, 'unixepoch'), ?3, ?4)
ORDER BY received_at, consumer, message_id
LIMIT ?5`),

		MarkPublished: func(keys int) string {
			return in(`
UPDATE {table} SET outputs = NULL, outputs_published_at = {now}
WHERE outputs IS NOT NULL AND (consumer, message_id) IN (VALUES `) + list("(?, ?)", ", ", keys) + ")"
		},
	}
}
