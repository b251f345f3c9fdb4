package dialect

import (
	"errors"
	"fmt"
	"time"

	"github.com/watermill-inbox/inbox"
)

// ErrUnsealed means that a row was committed without having been processed to its end.
var ErrUnsealed = errors.New("the inbox row was committed without its seal: an earlier handler ended the transaction " +
	"itself (DDL on MySQL, a raw COMMIT), so its writes may be there in part; check them, then delete the row with Forget " +
	"to have the message processed again")

// NewRecord returns the record that [Statements.Record] selected. A nil processedAt is ErrUnsealed.
func NewRecord(receivedAt int64, processedAt *int64, fingerprint, outputs []byte) (*inbox.Record, error) {
	if processedAt == nil {
		return nil, ErrUnsealed
	}
	record := &inbox.Record{ReceivedAt: Time(receivedAt), ProcessedAt: Time(*processedAt), Fingerprint: fingerprint}
	if outputs != nil {
		var err error
		if record.Outputs, err = DecodeMessages(outputs); err != nil {
			return nil, fmt.Errorf("decode recorded outputs: %w", err)
		}
	}
	return record, nil
}

// Time returns the point in time that a statement selected.
func Time(microseconds int64) time.Time { return time.UnixMicro(microseconds).UTC() }
