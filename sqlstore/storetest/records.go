package storetest

import (
	"bytes"
	"context"
	"fmt"
	"time"

	"github.com/ThreeDotsLabs/watermill/message"
)

func recordTellsTimes(ctx context.Context, h *Harness) error {
	if err := process(ctx, h, claimOf("id")); err != nil {
		return err
	}
	record, err := recorded(ctx, h.Store, claimOf("id"))
	if err != nil {
		return err
	}
	// The database's clock may be another one, but not by hours: that would be a time zone.
	if age := time.Since(record.ReceivedAt); age < -10*time.Minute || age > 10*time.Minute {
		return fmt.Errorf("ReceivedAt is %s, which is %s ago", record.ReceivedAt, age)
	}
	if took := record.ProcessedAt.Sub(record.ReceivedAt); took < 0 || took > time.Minute {
		return fmt.Errorf("ReceivedAt is %s, ProcessedAt %s", record.ReceivedAt, record.ProcessedAt)
	}
	return nil
}

func fingerprintIsKept(ctx context.Context, h *Harness) error {
	for id, fingerprint := range map[string][]byte{"none": nil, "some": {0x00, 0xff, 0x27, 0x5c}, "long": bytes.Repeat([]byte{0xab}, 64)} {
		claim := claimOf(id)
		claim.Fingerprint = bytes.Clone(fingerprint)
		if err := process(ctx, h, claim); err != nil {
			return err
		}
		duplicate := claimOf(id)
		for range 2 {
			duplicate.Fingerprint = []byte("of the duplicate, which leaves no trace")
			record, err := recorded(ctx, h.Store, duplicate)
			if err != nil {
				return err
			}
			if !bytes.Equal(record.Fingerprint, fingerprint) || (fingerprint == nil) != (record.Fingerprint == nil) {
				return fmt.Errorf("fingerprint %x came back as %x", fingerprint, record.Fingerprint)
			}
		}
	}
	return nil
}

// payloads are hard to store for one reason or another.
func payloads() [][]byte {
	return [][]byte{
		nil,
		{},
		{0},
		[]byte("{}"), []byte("{"), []byte(`"\u0000"`),
		{0xff, 0xfe},
		{0x08, 0x96, 0x01},
		[]byte("'; --"),
		bytes.Repeat([]byte{0x00, 0xff}, 1<<19), // 1 MB
	}
}

// metadata likewise.
func metadata() message.Metadata {
	return message.Metadata{"": "", "name": "", "odd \xff\x00": "\x00\xfe", "quotes": `'"\`, "é": "ａ"}
}

func anyPayloadIsStored(ctx context.Context, h *Harness) error {
	for i, payload := range payloads() {
		for j, m := range []message.Metadata{nil, {}, metadata()} {
			claim := claimOf(fmt.Sprint(i, j))
			claim.Message = &message.Message{Payload: payload, Metadata: m}
			if err := process(ctx, h, claim); err != nil {
				return fmt.Errorf("payload %d, metadata %d: %w", i, j, err)
			}
		}
	}
	return nil
}
