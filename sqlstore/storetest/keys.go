package storetest

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/watermill-inbox/inbox"
)

// ids are message IDs that are stored as they are, and of which each two differ.
var ids = []string{
	"abc", "ABC", "Abc", "abc ", " abc", "abc\t", "äbc", "a\u0308bc", "abc\u200b", "ABC ", "ßbc", "ssbc", "ａｂｃ", "\u0001", "🦀", "🦁",
	"1", "01", "1.0", "1e0", "NULL", "null", "true", "\n", "\r\n", "'; DROP TABLE inbox; --", `"`, "`", `\`, `\x00`, "%", "_", "?", "$1", "{table}",
	strings.Repeat("x", inbox.MaxKeyLength), strings.Repeat("x", inbox.MaxKeyLength-1) + "y", strings.Repeat("é", inbox.MaxKeyLength/2),
}

func keysAreExact(ctx context.Context, h *Harness) error {
	for _, id := range ids {
		if err := process(ctx, h, claimOf(id)); err != nil {
			return err
		}
	}
	for _, id := range ids {
		if _, err := recorded(ctx, h.Store, claimOf(id)); err != nil {
			return err
		}
	}
	return wantEffects(ctx, h, ids...)
}

func keysOfAnyBytes(ctx context.Context, h *Harness) error {
	long := strings.Repeat("x", 10_000)
	for _, id := range []string{
		"\x00", "a\x00b", "a", "\xff", "\xfe", "\xc3\x28", "\xed\xa0\x80", long, long + "x", long[1:],
		"sha256:", "sha256:" + strings.Repeat("0", 64), strings.Repeat("x", inbox.MaxKeyLength),
	} {
		for _, key := range []inbox.Key{{Consumer: consumer, MessageID: id}, {Consumer: id, MessageID: "id"}, {Consumer: id, MessageID: id}} {
			key, err := key.Normalize()
			if err != nil {
				return err
			}
			claim := inbox.Claim{Key: key, LockTimeout: time.Second}
			tx, err := own(ctx, h.Store, claim)
			if err != nil {
				return err
			}
			if err := tx.Commit(ctx, nil); err != nil {
				return errors.Join(fmt.Errorf("commit %q: %w", key, err), tx.Rollback(ctx))
			}
			if _, err := recorded(ctx, h.Store, claim); err != nil {
				return err
			}
		}
	}
	return nil
}

func consumersAreIndependent(ctx context.Context, h *Harness) error {
	for _, key := range []inbox.Key{
		{Consumer: "ab", MessageID: "c"},
		{Consumer: "a", MessageID: "bc"},
		{Consumer: "c", MessageID: "ab"},
		{Consumer: "abc", MessageID: "c"},
		{Consumer: "AB", MessageID: "c"},
		{Consumer: "ab ", MessageID: "c"},
	} {
		if err := process(ctx, h, inbox.Claim{Key: key, LockTimeout: time.Second}); err != nil {
			return err
		}
	}
	return wantEffects(ctx, h, "c", "bc", "ab", "c", "c", "c")
}
