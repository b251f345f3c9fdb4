package sqlstore

import (
	"cmp"
	"context"
	"database/sql"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"

	"github.com/watermill-inbox/inbox"
	"github.com/watermill-inbox/inbox/sqlstore/internal/dialect"
)

// keysPerStatement keeps statements on many keys below every database's number of parameters.
const keysPerStatement = 200

// MarkOutputsPublished implements [inbox.OutputsMarker]. After an error none of the keys is marked, or, if it was one of the
// commit, all may be; marking them again does no harm.
func (s *Store) MarkOutputsPublished(ctx context.Context, keys []inbox.Key) error {
	sorted := slices.SortedFunc(slices.Values(keys), func(a, b inbox.Key) int { // so that two of these do not deadlock
		return cmp.Or(cmp.Compare(a.Consumer, b.Consumer), cmp.Compare(a.MessageID, b.MessageID))
	})
	err := s.inTx(ctx, func(tx *sql.Tx) error {
		for batch := range batches(slices.Compact(sorted)) {
			if _, err := tx.ExecContext(ctx, s.statements.MarkPublished(len(batch)), keyArgs(batch)...); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		return s.wrap(ctx, "mark outputs as published", err)
	}
	return nil
}

func batches(keys []inbox.Key) iter.Seq[[]inbox.Key] { return slices.Chunk(keys, keysPerStatement) }

func keyArgs(keys []inbox.Key) []any {
	args := make([]any, 0, 2*len(keys))
	for _, key := range keys {
		args = append(args, key.Consumer, key.MessageID)
	}
	return args
}

// StrandedOutputs are the recorded outputs of a message that were not published. Soon after the message was processed that
// is normal. Later it means that the broker does not deliver the message again, so nobody publishes them: they are kept
// until [Store.PublishStranded] does, or [Store.Forget].
type StrandedOutputs struct {
	// Key is the message's key in its stored form.
	Key inbox.Key

	// ReceivedAt and ProcessedAt are when the message was, by the database's clock.
	ReceivedAt, ProcessedAt time.Time

	// Outputs are the messages that the handler returned.
	Outputs []*message.Message
}

// ListStrandedParams selects what [Store.ListStranded] returns.
type ListStrandedParams struct {
	// OlderThan selects messages that were received longer ago. Take more than a delivery and its redeliveries need.
	// Defaults to 0: all.
	OlderThan time.Duration

	// Limit is how many are returned at most. Defaults to 100.
	Limit int

	// After goes on behind an element that an earlier call returned. Defaults to the oldest.
	After *StrandedOutputs
}

// ListStranded returns outputs that were not published, the longest received first.
func (s *Store) ListStranded(ctx context.Context, params ListStrandedParams) ([]StrandedOutputs, error) {
	if params.OlderThan < 0 || params.Limit < 0 {
		return nil, errors.New("inbox: list stranded outputs: OlderThan or Limit is negative")
	}
	if params.Limit == 0 {
		params.Limit = 100
	}
	var (
		after   inbox.Key
		afterAt int64
	)
	if params.After != nil {
		after, afterAt = params.After.Key, params.After.ReceivedAt.UnixMicro()
	}
	rows, err := s.db.QueryContext(ctx, s.statements.Stranded,
		params.OlderThan.Microseconds(), afterAt, after.Consumer, after.MessageID, params.Limit)
	if err != nil {
		return nil, s.wrap(ctx, "list stranded outputs", err)
	}
	defer func() { _ = rows.Close() }()
	var found []StrandedOutputs
	for rows.Next() {
		var (
			stranded    StrandedOutputs
			receivedAt  int64
			processedAt *int64
			outputs     []byte
		)
		err := rows.Scan(&stranded.Key.Consumer, &stranded.Key.MessageID, &receivedAt, &processedAt, &outputs)
		if err != nil {
			return nil, s.wrap(ctx, "list stranded outputs", err)
		}
		record, err := dialect.NewRecord(receivedAt, processedAt, nil, outputs)
		if err != nil {
			return nil, fmt.Errorf("inbox: list stranded outputs: consumer %q, message %q: %w",
				stranded.Key.Consumer, stranded.Key.MessageID, err)
		}
		stranded.ReceivedAt, stranded.ProcessedAt, stranded.Outputs = record.ReceivedAt, record.ProcessedAt, record.Outputs
		found = append(found, stranded)
	}
	if err := rows.Err(); err != nil {
		return nil, s.wrap(ctx, "list stranded outputs", err)
	}
	return found, nil
}

// CountStranded returns how many messages were received longer ago than olderThan and have outputs that were not
// published. It is cheap enough for a gauge.
func (s *Store) CountStranded(ctx context.Context, olderThan time.Duration) (int64, error) {
	if olderThan < 0 {
		return 0, errors.New("inbox: count stranded outputs: the age is negative")
	}
	var count int64
	if err := s.db.QueryRowContext(ctx, s.statements.CountStranded, olderThan.Microseconds()).Scan(&count); err != nil {
		return 0, s.wrap(ctx, "count stranded outputs", err)
	}
	return count, nil
}

// PublishStranded publishes the outputs on a topic, in order, and marks them as published. If it fails, or the message is
// delivered again at the same time, some are published more than once, with the UUIDs that they have.
func (s *Store) PublishStranded(
	ctx context.Context, stranded StrandedOutputs, topic string, publisher message.Publisher,
) error {
	for _, msg := range stranded.Outputs {
		msg.SetContext(ctx)
	}
	if err := publisher.Publish(topic, stranded.Outputs...); err != nil {
		return fmt.Errorf("inbox: publish stranded outputs: %w", err)
	}
	return s.MarkOutputsPublished(ctx, []inbox.Key{stranded.Key})
}
