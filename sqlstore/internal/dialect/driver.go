package dialect

import "reflect"

// PackagePath returns where the type of a driver, of its connection or of its error is from: all that is known of one that
// is not imported.
func PackagePath(v any) string {
	t := reflect.TypeOf(v)
	if t == nil {
		return ""
	}
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	return t.PkgPath()
}

// mySQLNumber returns the code of go-sql-driver's error, which is in a field, so that it takes reflection to read it
// without the driver. It is 0 for other errors.
func mySQLNumber(err error) uint64 {
	if PackagePath(err) != "github.com/go-sql-driver/mysql" {
		return 0
	}
	v := reflect.ValueOf(err)
	if v.Kind() != reflect.Pointer || v.IsNil() || v.Elem().Kind() != reflect.Struct {
		return 0
	}
	number := v.Elem().FieldByName("Number")
	if !number.IsValid() || number.Kind() != reflect.Uint16 {
		return 0
	}
	return number.Uint()
}

// sqliteCode returns the extended code of modernc.org/sqlite's error. It is 0 for other errors: an application's may have
// a method Code as well.
func sqliteCode(err error) int {
	coded, ok := err.(interface{ Code() int }) //nolint:errorlint // its callers walk the tree
	if !ok || PackagePath(err) != "modernc.org/sqlite" {
		return 0
	}
	return coded.Code()
}
