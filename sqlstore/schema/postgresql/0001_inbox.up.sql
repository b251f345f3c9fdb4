-- received_at is when the message was claimed, processed_at when its transaction was about to commit.
-- payload and metadata are there with Config.StorePayload only; outputs while they were not published.
-- One row is inserted per message, updated at most twice, and deleted after the retention.
CREATE TABLE IF NOT EXISTS "inbox" (
    consumer             text COLLATE "C" NOT NULL,
    message_id           text COLLATE "C" NOT NULL,
    received_at          timestamptz      NOT NULL,
    processed_at         timestamptz      NOT NULL,
    fingerprint          bytea,
    payload              bytea,
    metadata             bytea,
    outputs              bytea,
    outputs_published_at timestamptz,
    PRIMARY KEY (consumer, message_id)
) WITH (fillfactor = 90);

-- What the cleanup may delete, oldest first.
CREATE INDEX IF NOT EXISTS "inbox_received_at_idx" ON "inbox" (received_at) WHERE outputs IS NULL;

-- What it must not: messages that wait to be published.
CREATE INDEX IF NOT EXISTS "inbox_outputs_idx" ON "inbox" (received_at) WHERE outputs IS NOT NULL;
