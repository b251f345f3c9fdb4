-- Keys are compared byte by byte, which no text collation does: hence VARBINARY.
-- received_at is when the message was claimed, processed_at when its transaction was about to commit, both in UTC.
-- A committed row without processed_at was left by a handler that ended its transaction itself.
-- payload and metadata are there with Config.StorePayload only; outputs while they were not published.
CREATE TABLE IF NOT EXISTS `inbox` (
    consumer             VARBINARY(255) NOT NULL,
    message_id           VARBINARY(255) NOT NULL,
    received_at          DATETIME(6)    NOT NULL,
    processed_at         DATETIME(6),
    fingerprint          VARBINARY(255),
    payload              LONGBLOB,
    metadata             LONGBLOB,
    outputs              LONGBLOB,
    outputs_pending      BOOLEAN        NOT NULL DEFAULT FALSE,
    outputs_published_at DATETIME(6),
    PRIMARY KEY (consumer, message_id),
    INDEX outputs_pending_received_at (outputs_pending, received_at)
) ENGINE = InnoDB;
