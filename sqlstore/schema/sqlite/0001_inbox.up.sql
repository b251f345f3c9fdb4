-- received_at is when the message was claimed, processed_at when its transaction was about to commit, both in UTC.
-- A committed row without processed_at was left by a handler that ended its transaction itself.
-- payload and metadata are there with Config.StorePayload only; outputs while they were not published.
CREATE TABLE IF NOT EXISTS "inbox" (
    consumer             TEXT NOT NULL,
    message_id           TEXT NOT NULL,
    received_at          TEXT NOT NULL,
    processed_at         TEXT,
    fingerprint          BLOB,
    payload              BLOB,
    metadata             BLOB,
    outputs              BLOB,
    outputs_published_at TEXT,
    PRIMARY KEY (consumer, message_id)
) WITHOUT ROWID;

-- What the cleanup may delete, oldest first.
CREATE INDEX IF NOT EXISTS "inbox_received_at_idx" ON "inbox" (received_at) WHERE outputs IS NULL;

-- What it must not: messages that wait to be published.
CREATE INDEX IF NOT EXISTS "inbox_outputs_idx" ON "inbox" (received_at) WHERE outputs IS NOT NULL;
